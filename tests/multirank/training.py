"""Short trainings of one tiny model: through ds_hybrid, through stock DeepSpeed, and on one plain process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hybrid
from tests.multirank.models import VOCABULARY, make_model

_LENGTH = 12

PLANS = {plan: json.loads(Path(f"ds_configs/plan_{plan}_zero1_bf16.json").read_text()) for plan in ("a", "b")}
"""The shipped ds_configs of both plans. Their partition_config shards the attention of all presets."""

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True, "weight_decay": 0.1}}
"""Of a ds_config. The steps of the tiny models are large enough that a lost moment shows."""


@dataclass(frozen=True)
class Run:
    """One training: what varies between the compared ones."""

    model_type: str = "qwen3_moe"
    mode: str = "two_stage"
    ep_size: int = 2
    zero_stage: int = 1
    zero_options: dict[str, Any] = field(default_factory=dict, hash=False)
    bf16: bool = False
    clip: float = 0.0
    num_steps: int = 10
    accumulation: int = 1
    router_logits: bool = False
    checkpointing: bool | None = None  # None: off; else use_reentrant
    overlap_chunks: int = 1
    wire_dtype: str = "auto"
    expert_groups: Any = "auto"
    uneven: bool = False  # sequence lengths differ between ranks and steps
    trained: tuple[str, ...] = ("",)  # parts of the plain model's names of what is not frozen
    hand_over: Literal["all", "trained"] = "all"  # what initialize gets as model_parameters
    tp_size: int = 1  # ranks that share one copy of the attention, and the batch
    num_kv_heads: int | None = None  # None: the tiny model's own
    adam: bool = False  # else SGD
    fp32_gradients: bool = False  # accumulated in fp32 beside bf16 weights: another optimizer of DeepSpeed's

    @property
    def learning_rate(self) -> float:
        """Large enough in fp32 that a wrong gradient shows; small in bf16, where rounding flips routes."""
        return 0.01 if self.bf16 else 0.3

    @property
    def model_changes(self) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if self.router_logits:
            changes |= {"output_router_logits": True, "router_aux_loss_coef": 0.1}
        if self.num_kv_heads is not None:
            changes["num_key_value_heads"] = self.num_kv_heads
        return changes

    def length(self, step: int, rank: int) -> int:
        """Of a rank's sequences at a step."""
        return 2 + (3 * step + 5 * rank) % 11 if self.uneven else _LENGTH

    def ds_config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "optimizer": ADAM if self.adam else {"type": "SGD", "params": {"lr": self.learning_rate}},
            "zero_optimization": {"stage": self.zero_stage, **self.zero_options},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.bf16},
            "data_types": {"grad_accum_dtype": "fp32"} if self.fp32_gradients else {},
            "expert_parallel": {"enabled": True, "autoep_size": self.ep_size},
            "tensor_parallel": PLANS["a"]["tensor_parallel"] | {"autotp_size": self.tp_size}
            if self.tp_size > 1
            else {},
            "ds_hybrid": {
                "dispatch": {
                    "mode": self.mode,
                    "overlap_chunks": self.overlap_chunks,
                    "wire_dtype": self.wire_dtype,
                },
                "topology": {"expert_groups": self.expert_groups},
            },
            "steps_per_print": 1000000,
        }


@dataclass(frozen=True)
class Outcome:
    """The mean loss of all ranks at each step, and the trained parameters by the plain model's names."""

    losses: list[float]
    parameters: dict[str, Tensor]
    norms: list[float]

    def __post_init__(self) -> None:
        assert all(map(math.isfinite, [*self.losses, *self.norms]))
        assert all(parameter.isfinite().all() for parameter in self.parameters.values())


def largest_difference(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def batch(step: int, rank: int, micro: int = 0, *, length: int = _LENGTH) -> Tensor:
    """[2, length] token ids, different for every step, data-parallel rank and micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randint(0, VOCABULARY, (2, length), generator=generator)


def train_plain(run: Run, num_ranks: int) -> Outcome:
    """The reference: one process, the mean loss of all data-parallel ranks' batches, the same optimizer."""
    model = make_prepared(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.learning_rate)
    losses, norms = [], []
    for step in range(run.num_steps):
        optimizer.zero_grad()
        parts = [(rank, micro) for rank in range(num_ranks // run.tp_size) for micro in range(run.accumulation)]
        total = 0.0
        for rank, micro in parts:
            loss = _loss(model, batch(step, rank, micro, length=run.length(step, rank))) / len(parts)
            loss.backward()
            total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), run.clip or float("inf"))))
        optimizer.step()
        losses.append(total)
    return Outcome(losses, {name: p.detach().clone() for name, p in model.named_parameters()}, norms)


def make_engine(run: Run) -> Any:
    """An engine of ``ds_hybrid.initialize`` over the run's model."""
    model = make_prepared(run)
    parameters = [p for p in model.parameters() if p.requires_grad or run.hand_over == "all"]
    return ds_hybrid.initialize(model=model, model_parameters=parameters, config=run.ds_config())[0]


def train_hybrid(run: Run, change: Callable[[Any], None] | None = None) -> Outcome:
    """Through ``ds_hybrid.initialize`` on the calling ranks. ``change`` may spoil the engine before it trains."""
    engine = make_engine(run)
    if change is not None:
        change(engine)
    return _train(engine, run)


def train_stock(run: Run) -> Outcome:
    """Through ``deepspeed.initialize`` and its own AutoEP."""
    model = make_prepared(run)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=run.ds_config())
    return _train(engine, run)


def make_prepared(run: Run) -> nn.Module:
    model = make_model(run.model_type, **run.model_changes)
    if run.checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": run.checkpointing})  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in run.trained))
    model.train()
    return model


def _loss(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _train(engine: Any, run: Run) -> Outcome:
    losses, norms = [], []
    rank = dist.get_rank() // run.tp_size
    for step in range(run.num_steps):
        total = torch.zeros(())
        for micro in range(run.accumulation):
            loss = _loss(engine, batch(step, rank, micro, length=run.length(step, rank)))
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / run.accumulation
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    outcome = Outcome(losses, gather_parameters(engine.module), norms)
    engine.destroy()
    return outcome


def gather_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter whole, by the plain model's names: experts of all ranks joined in logical order, shards too."""
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, layer in model.named_modules():
        if isinstance(layer, LinearLayer | LinearAllreduce):
            dim = 1 if isinstance(layer, LinearAllreduce) else 0
            parameters[f"{name}.weight"] = all_parts(parameters[f"{name}.weight"], layer.mp_group, dim)
        if not isinstance(layer, AutoEPMoELayer):
            continue
        w1, w2, w3 = (all_experts(parameters.pop(f"{name}.experts.{w}"), layer.ep_group) for w in ("w1", "w2", "w3"))
        parameters[f"{name}.experts.gate_up_proj"] = torch.cat([w1, w3], 1)
        parameters[f"{name}.experts.down_proj"] = w2
        parameters[f"{name}.gate.weight"] = parameters.pop(f"{name}.router.gate.weight")
        if layer.model_family in ("qwen3_moe", "qwen3_5_moe"):
            parameters = {key.replace("shared_experts", "shared_expert"): value for key, value in parameters.items()}
    return parameters


def all_experts(local: Tensor, group: Any) -> Tensor:
    """The experts of every rank of the group, in rank order. [E/P, ...] -> [E, ...]."""
    return all_parts(local, group, 0)


def all_parts(local: Tensor, group: Any, dim: int) -> Tensor:
    """What every rank of the group has, joined along ``dim`` in rank order."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, local.detach(), group=group)  # a parameter has marks that do not travel
    return torch.cat(parts, dim)


def worst_parameter(trained: Outcome, reference: Outcome, initial: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error of any parameter, relative to the largest change that training made to it."""
    assert trained.parameters.keys() == reference.parameters.keys()
    errors = []
    for name, expected in reference.parameters.items():
        change = (expected.double() - initial[name].double()).abs().max()
        error = (trained.parameters[name].double() - expected.double()).abs().max()
        errors.append((float(error / change.clamp_min(1e-6)), name))
    return max(errors)


def initial_parameters(run: Run) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in make_prepared(run).named_parameters()}
