"""A candidate as a complete ds_config. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_hybrid.config import HybridConfig
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.model import ModelShape
from ds_hybrid.plan.states import reduce_bucket_size

SHARDED_ATTENTION: Mapping[str, Any] = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.self_attn\.(q|k|v|q_b|kv_b)_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.self_attn\.o_proj\.weight$"], "partition_type": "row"},
    ],
}
"""``tensor_parallel.partition_config``: what is sharded of every architecture that the planner knows."""


def to_ds_config(
    model: ModelShape, work: Workload, candidate: Candidate, header: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The ds_config that trains so, with every key of the "ds_hybrid" section.

    Args:
        header: goes under ``ds_hybrid.plan``, for people.
    """
    section = HybridConfig().model_dump(mode="json")
    section["dispatch"]["mode"] = candidate.mode
    if candidate.sp_size > 1:
        section["attention"]["kv_gather"] = "auto"
    section["plan"] = dict(header) if header is not None else None
    zero: dict[str, Any] = {"stage": candidate.zero_stage}
    if candidate.zero_stage:
        zero["reduce_bucket_size"] = reduce_bucket_size(model, candidate)
    return {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": candidate.micro_batches,
        "gradient_clipping": 1.0,
        "steps_per_print": 100000,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 3e-4, "warmup_num_steps": 100, "warmup_type": "linear"},
        },
        "bf16": {"enabled": work.value_bytes == 2},
        "zero_optimization": zero,
        **_tensor_parallel(candidate),
        **({"sequence_parallel_size": candidate.sp_size} if candidate.sp_size > 1 else {}),
        "expert_parallel": {"enabled": True, "autoep_size": candidate.ep_size},
        "ds_hybrid": section,
    }


def _tensor_parallel(candidate: Candidate) -> dict[str, Any]:
    if candidate.tp_size == 1:
        return {}
    return {"tensor_parallel": {"autotp_size": candidate.tp_size, "partition_config": dict(SHARDED_ATTENTION)}}
