"""Bytes that the planner predicts against those of real models in real training: states to 5 %, activations to 15 %."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ds_hybrid
from ds_hybrid.dispatch.modes import Mode
from ds_hybrid.plan.candidate import AttentionKernel, Candidate, Workload
from ds_hybrid.plan.memory import saved_activations
from ds_hybrid.plan.model_file import model_from_config
from ds_hybrid.plan.routing import RoutingLaw
from ds_hybrid.plan.states import states
from ds_hybrid.plan.traffic import zero_traffic
from tests.multirank.models import CONFIGS
from tests.multirank.sent_bytes import counted_collectives, dispatched
from tests.multirank.training import ADAM
from tests.ranks import RankPool

SEQ_LEN, BATCH = 64, 2
WIDTHS = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 96}
MODELS: dict[str, dict[str, Any]] = {
    name: {**CONFIGS[name], **{key: width for key, width in WIDTHS.items() if key in CONFIGS[name]}}
    for name in ("mixtral", "qwen3_moe", "deepseek_v3")
}


@dataclass(frozen=True)
class Case:
    """A training, and how it keeps its values."""

    model_type: str
    ep_size: int
    zero_stage: int
    mode: Mode
    dtype: str = "float32"
    attention: AttentionKernel = "eager"

    @property
    def work(self) -> Workload:
        return Workload(SEQ_LEN, BATCH, 2 if self.dtype == "bf16" else 4, self.attention)

    @property
    def candidate(self) -> Candidate:
        return Candidate(4, 1, self.ep_size, self.zero_stage, self.mode)


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank, each storage once, and what was routed: [layers, E] (token, choice) pairs of this rank.

    ``sent`` is what left the rank in backward and step, but for dispatch.
    """

    weights: int
    gradients: int
    optimizer: int
    saved: int
    sent: int
    loads: list[list[int]]


CASES = [
    Case("qwen3_moe", 1, 0, "allgather"),
    Case("qwen3_moe", 2, 0, "two_stage", dtype="bf16"),
    Case("qwen3_moe", 4, 0, "alltoall", attention="fused"),
    Case("qwen3_moe", 1, 1, "allgather", dtype="bf16"),
    Case("qwen3_moe", 2, 1, "two_stage", attention="fused"),
    Case("qwen3_moe", 4, 1, "two_stage", dtype="bf16", attention="fused"),
    Case("qwen3_moe", 1, 2, "allgather", attention="fused"),
    Case("qwen3_moe", 2, 2, "alltoall"),
    Case("qwen3_moe", 4, 2, "allgather", dtype="bf16"),
    Case("mixtral", 4, 1, "allgather", dtype="bf16", attention="fused"),
    Case("mixtral", 2, 2, "two_stage"),
    Case("deepseek_v3", 2, 1, "two_stage"),
    Case("deepseek_v3", 4, 2, "alltoall", dtype="bf16"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(v) for v in vars(case).values()))
def test_predicted_bytes_are_those_of_a_training(four_ranks: RankPool, case: Case) -> None:
    measured = four_ranks.run(measure, case)
    shape = model_from_config({"model_type": case.model_type, **MODELS[case.model_type]}, label="tiny", file="tiny")
    predicted = states(shape, case.candidate, value_bytes=case.work.value_bytes)
    for name in ("weights", "gradients", "optimizer"):
        most = max(getattr(rank, name) for rank in measured)
        assert getattr(predicted, name) == pytest.approx(most, rel=0.05), name

    zero = zero_traffic(shape, case.work, case.candidate)
    sent = sum(kind.reduction.num_bytes + kind.gathers.num_bytes for kind in zero)
    assert [rank.sent for rank in measured] == pytest.approx([sent] * 4, abs=32)  # and norms, and flags

    # What was routed is the law: a rank gets what the tokens of its group chose.
    loads = np.sum([rank.loads for rank in measured], axis=0)
    law = RoutingLaw("as measured", shape.top_k * loads / loads.sum(1, keepdims=True), shape.num_moe_layers)
    saved = saved_activations(shape, case.work, case.candidate, law.demand(case.ep_size))
    assert saved == pytest.approx(max(rank.saved for rank in measured), rel=0.15)


def test_a_prediction_for_another_stage_or_kernel_would_fail() -> None:
    """A control: the cases are told apart by more than the tolerances."""
    shape = model_from_config({"model_type": "qwen3_moe", **MODELS["qwen3_moe"]}, label="tiny", file="tiny")
    by_stage = [states(shape, Candidate(4, 1, 2, stage, "two_stage"), value_bytes=2) for stage in (0, 1, 2)]
    assert by_stage[1].optimizer < 0.6 * by_stage[0].optimizer
    assert by_stage[2].gradients < 0.6 * by_stage[1].gradients
    law = RoutingLaw("even", np.full((1, 8), 3 / 8), 2)
    kernels: tuple[AttentionKernel, ...] = ("fused", "eager")
    fused, eager = (
        saved_activations(shape, Workload(SEQ_LEN, BATCH, 2, kernel), Candidate(4, 1, 2, 1, "two_stage"), law.demand(2))
        for kernel in kernels
    )
    assert eager > 1.2 * fused


def measure(case: Case) -> Measured:
    """One step of training on this rank."""
    import transformers

    fields = {**MODELS[case.model_type], "use_cache": False}
    config = transformers.AutoConfig.for_model(case.model_type, **fields)
    torch.manual_seed(0)
    kernel = "eager" if case.attention == "eager" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=kernel)
    engine, *_ = ds_hybrid.initialize(
        model=model, model_parameters=list(model.parameters()), config=ds_config(case, sum_of(model.parameters()))
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, fields["vocab_size"], (BATCH, SEQ_LEN + 1), generator=generator)
    weights = storages(engine.module.parameters())

    saved: dict[int, int] = {}
    alive = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)  # else another may get its address
        saved.update({key: size for key, size in storages([tensor]).items() if key not in weights})
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = engine(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    alive.clear()
    before = dispatched(engine)
    with counted_collectives() as sent:
        gradients = gradients_of_backward(engine, loss)
        engine.step()
    num_sent = sum(sent) - (dispatched(engine) - before)
    basic = getattr(engine.optimizer, "optimizer", engine.optimizer)
    owned = [parameter for group in basic.param_groups for parameter in group["params"]]
    moments = [value for state in basic.state.values() for value in state.values() if torch.is_tensor(value)]
    optimizer = {key: size for key, size in storages([*owned, *moments]).items() if key not in weights}
    loads = [layer.expert_load.tolist() for layer in engine.module.modules() if hasattr(layer, "expert_load")]
    measured = Measured(sum(weights.values()), gradients, sum(optimizer.values()), sum(saved.values()), num_sent, loads)
    engine.destroy()
    return measured


def gradients_of_backward(engine: Any, loss: torch.Tensor) -> int:
    """Bytes at the end of a backward: below ZeRO 2 before DeepSpeed adds them up, from there on what stays."""
    found: list[int] = []
    parameters = list(engine.module.parameters())

    def look() -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        owned = getattr(engine.optimizer, "averaged_gradients", None) or {}
        gradients += [gradient for part in owned.values() if part for gradient in part]
        found.append(sum(storages(gradients).values()))

    if engine.zero_optimization_stage() == 1:
        reduce = engine.optimizer.reduce_gradients

        def look_first(*args: Any, **options: Any) -> Any:
            look()
            return reduce(*args, **options)

        engine.optimizer.reduce_gradients = look_first
    engine.backward(loss)
    look()
    return max(found)


def ds_config(case: Case, num_parameters: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": ADAM,
        "zero_optimization": {"stage": case.zero_stage, "reduce_bucket_size": num_parameters},
        "bf16": {"enabled": case.dtype == "bf16"},
        "expert_parallel": {"enabled": True, "autoep_size": case.ep_size},
        "ds_hybrid": {"dispatch": {"mode": case.mode}},
        "steps_per_print": 1000000,
    }


def sum_of(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


def storages(tensors: Any) -> dict[int, int]:
    """Address -> bytes of every storage, each once; scalars such as Adam's step count are left out."""
    found = (tensor.untyped_storage() for tensor in tensors if tensor.dim() > 0)
    return {storage.data_ptr(): storage.nbytes() for storage in found}
