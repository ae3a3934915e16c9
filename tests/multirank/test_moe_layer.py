"""``ds_hybrid.MoE`` on several ranks against a layer written token by token: outputs, losses, counts, all gradients.

Every rank's tokens are known everywhere, so each rank works the whole reference out for itself. In float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_hybrid
from ds_hybrid import ConfigError
from ds_hybrid.dispatch.modes import MODES, Mode
from ds_hybrid.placement import ExpertPlacement
from tests.dispatch.reference import relative_error
from tests.moe.reference import Reference, dense_moe
from tests.ranks import RankPool

HIDDEN, EXPERTS = 8, 4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
DROP = {"drop_tokens": True, "min_capacity": 0}


@dataclass(frozen=True)
class Case:
    """``num_tokens`` and ``masked`` have one entry per rank; ``masked`` counts the last tokens of a rank."""

    num_tokens: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    masked: tuple[int, ...] = ()
    mode: Mode = "two_stage"
    dtype: torch.dtype = torch.float64
    equal_tokens: bool = False
    favourite: int | None = None
    """An expert to which every first choice goes."""
    checkpointing: bool | None = None
    """None: off; else use_reentrant."""


@dataclass(frozen=True)
class Errors:
    """The largest relative error of each kind on one rank; counts are compared exactly."""

    output: float
    l_aux: float
    grad_tokens: float
    grad_gate: float
    grad_experts: float
    same_counts: bool

    @property
    def worst(self) -> float:
        return max(self.output, self.l_aux, self.grad_tokens, self.grad_gate, self.grad_experts)


CASES = {
    "k = 1": Case((6, 6), {"k": 1}),
    "k = 3": Case((6, 6), {"k": 3}),
    "all experts": Case((6, 6), {"k": 4}),
    "four ranks": Case((5, 7, 3, 6), {"k": 2}),
    "residual": Case((6, 4), {"k": 2, "use_residual": True}),
    "sigmoid, groups, z-loss": Case(
        (6, 5), {"k": 2, "num_experts": 8, "score": "sigmoid", "num_groups": 4, "topk_groups": 2, "z_loss_weight": 0.1}
    ),
    "lengths 12 and 5": Case((12, 5), {"k": 2}),
    "lengths 1 and 64": Case((1, 64), {"k": 2}),
    "masked": Case((8, 6), {"k": 2}, masked=(3, 5)),
    "one rank masked whole": Case((8, 6), {"k": 2}, masked=(0, 6)),
    "empty rank, k = 1": Case((8, 0), {"k": 1}),
    "empty rank, k = 2": Case((8, 0), {"k": 2}),
    "empty rank, k = 3": Case((0, 8), {"k": 3}),
    "empty rank, dropping": Case((8, 0), {"k": 1, **DROP}),
    "no tokens anywhere": Case((0, 0), {"k": 2}),
    "dropping, lengths 8 and 3": Case((8, 3), {"k": 1, **DROP}),
    "dropping by position": Case((12, 5), {"k": 2, "drop_policy": "position", "capacity_factor": 0.6, **DROP}),
    "dropping by probability, masked": Case((12, 7), {"k": 2, "capacity_factor": 0.6, **DROP}, masked=(5, 0)),
    "least capacity above the tokens, 8 and 3": Case((8, 3), {"k": 1, "drop_tokens": True}),
    "least capacity above the tokens, 3 and 3": Case((3, 3), {"k": 1, "drop_tokens": True}),
    "least capacity above the tokens, 1 and 1": Case((1, 1), {"k": 1, "drop_tokens": True}),
    "a rank's experts starve": Case((6, 4), {"k": 1}, favourite=1),
    "equal tokens, recomputed": Case((8, 8), {"k": 2}, equal_tokens=True, checkpointing=False),
    "equal tokens, recomputed reentrantly": Case((8, 5), {"k": 2}, equal_tokens=True, checkpointing=True),
    "dropping, recomputed": Case((8, 5), {"k": 2, "capacity_factor": 0.5, **DROP}, checkpointing=True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(two_ranks: RankPool, four_ranks: RankPool, name: str, mode: Mode) -> None:
    """R2, R4, U1, U2, U3, U5, U6, A1, O1, O2, each by its case."""
    case = CASES[name]
    pool = {2: two_ranks, 4: four_ranks}[len(case.num_tokens)]
    for errors in pool.run(compare, case, mode):
        assert errors.same_counts
        assert errors.worst <= TOLERANCE[case.dtype], errors


@pytest.mark.parametrize("mode", MODES)
def test_nothing_reads_uninitialised_memory(two_ranks: RankPool, mode: Mode) -> None:
    """O2: with every torch.empty full of NaN."""
    for errors in two_ranks.run(compare_with_nan_in_empty, CASES["masked"], mode):
        assert errors.worst <= 1e-12, errors


def test_dispatchers_agree(two_ranks: RankPool) -> None:
    """O3: within 1e-6 in fp32 and 2e-2 in bf16, relative to the largest output."""
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        for outputs in two_ranks.run(outputs_of_modes, dtype):
            assert max(relative_error(output, outputs[0]) for output in outputs) <= tolerance


def test_experts_are_the_same_for_every_ep_size(four_ranks: RankPool) -> None:
    """R6: whatever the groups, logical expert e starts with the same values."""
    whole, *others = (gathered_experts(four_ranks, ep_size) for ep_size in (1, 2, 4))
    assert len({tuple(weights) for weights in whole.values()}) == EXPERTS
    for experts in others:
        assert experts == whole


@pytest.mark.parametrize("mode", MODES)
def test_any_placement(two_ranks: RankPool, mode: Mode) -> None:
    """Experts 3 and 0 on rank 0, 2 and 1 on rank 1: the outputs are those of the reference."""
    for error in two_ranks.run(output_error_with_placement, [[3, 0], [2, 1]], mode):
        assert error <= 1e-12


def test_an_ep_size_that_does_not_divide_the_world(four_ranks: RankPool) -> None:
    (message,) = set(four_ranks.run(message_of, 3))
    assert message == (
        "ds_hybrid.MoE(ep_size=3): must divide the world size 4 and num_experts = 12. Values that work: 1, 2, 4."
    )


def test_a_rank_evaluates_alone_without_expert_parallelism(two_ranks: RankPool) -> None:
    """U4: rank 1 does not take part, and stays alive."""
    assert two_ranks.run(evaluate_on_rank_0, limit=30.0) == [(12, HIDDEN), None]


def make_layer(case: Case, *, ep_size: int, mode: Mode) -> ds_hybrid.MoE:
    torch.manual_seed(0)
    options = {"num_experts": EXPERTS, **case.options}
    layer = ds_hybrid.MoE(HIDDEN, expert, ep_size=ep_size, dispatch=mode, seed=7, **options).to(case.dtype)
    generator = torch.Generator().manual_seed(1)
    gate = layer.deepspeed_moe.gate.wg.weight
    with torch.no_grad():
        gate.copy_(torch.randn(gate.shape, generator=generator))
        if case.favourite is not None:
            gate[case.favourite] = 100.0
    return layer


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 6), nn.Tanh(), nn.Linear(6, HIDDEN))


def make_tokens(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, the gradient of the output, and the mask of a rank."""
    num = case.num_tokens[rank]
    generator = torch.Generator().manual_seed(10 + rank)
    tokens, upstream = torch.randn(2, num, HIDDEN, generator=generator, dtype=torch.float64).to(case.dtype)
    if case.equal_tokens:
        tokens = torch.linspace(-1, 1, HIDDEN, dtype=case.dtype).repeat(num, 1)
    if case.favourite is not None:
        tokens = tokens.abs()
    mask = torch.arange(num) < num - case.masked[rank] if case.masked else None
    return tokens, upstream, mask


def compare(case: Case, mode: Mode) -> Errors:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layer = make_layer(case, ep_size=world_size, mode=mode)
    layer.set_deepspeed_parallelism()
    tokens, upstream, mask = make_tokens(case, rank)
    tokens.requires_grad_()
    result = layer.run(tokens, mask)
    if case.checkpointing is None:
        output, l_aux = result.output, result.l_aux
    else:
        output, l_aux, _ = checkpoint(layer, tokens, mask, use_reentrant=case.checkpointing)
    ((output * upstream).sum() + l_aux).backward()

    whole = make_layer(case, ep_size=1, mode=mode)
    inputs = [make_tokens(case, r) for r in range(world_size)]
    references = [reference_of(whole, t.requires_grad_(), m) for t, _, m in inputs]
    for reference, (_, grad, _) in zip(references, inputs, strict=True):
        ((reference.output * grad).sum() + reference.l_aux).backward()
    gate_grad = layer.deepspeed_moe.gate.wg.weight.grad
    dist.all_reduce(gate_grad)
    mine = references[rank]
    first = rank * layer.num_local_experts
    experts_of_reference = whole.deepspeed_moe.experts.deepspeed_experts[first : first + layer.num_local_experts]
    return Errors(
        output=relative_error(output.detach(), mine.output.detach()),
        l_aux=relative_error(l_aux.detach()[None], mine.l_aux.detach()[None]),
        grad_tokens=error_of_gradient(tokens.grad, inputs[rank][0].grad),
        grad_gate=error_of_gradient(gate_grad, whole.deepspeed_moe.gate.wg.weight.grad),
        grad_experts=max(
            error_of_gradient(p.grad, q.grad)
            for p, q in zip(layer.deepspeed_moe.experts.parameters(), experts_of_reference.parameters(), strict=True)
        ),
        same_counts=result.num_routed.tolist() == mine.num_routed
        and result.num_processed.tolist() == mine.num_processed,
    )


def reference_of(layer: ds_hybrid.MoE, tokens: Tensor, mask: Tensor | None) -> Reference:
    gate, experts = layer.deepspeed_moe.gate, list(layer.deepspeed_moe.experts.deepspeed_experts)
    used = None if mask is None else mask.tolist()
    reference = dense_moe(tokens, gate.wg.weight, experts, gate.options, used)
    if not layer.use_residual:
        return reference
    shares = layer.coefficient(tokens).softmax(1)
    output = reference.output * shares[:, :1] + layer.mlp(tokens) * shares[:, 1:]
    return Reference(output, reference.l_aux, reference.num_routed, reference.num_processed)


def error_of_gradient(actual: Tensor | None, expected: Tensor | None) -> float:
    """A missing gradient is wrong here, and stands for 0 in the reference."""
    assert actual is not None
    return relative_error(actual, torch.zeros_like(actual) if expected is None else expected)


def compare_with_nan_in_empty(case: Case, mode: Mode) -> Errors:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        return compare(case, mode)
    finally:
        torch.use_deterministic_algorithms(False)


def outputs_of_modes(dtype: torch.dtype) -> list[Tensor]:
    case = Case((24, 17), {"k": 3}, dtype=dtype)
    outputs = []
    for mode in MODES:
        layer = make_layer(case, ep_size=2, mode=mode)
        layer.set_deepspeed_parallelism()
        outputs.append(layer(make_tokens(case, dist.get_rank())[0])[0].detach())
    return outputs


def gathered_experts(pool: RankPool, ep_size: int) -> dict[int, list[float]]:
    """The first weights of each logical expert; ranks that hold the same one agree."""
    found: dict[int, list[float]] = {}
    for experts in pool.run(experts_of_rank, ep_size):
        for expert_id, weights in experts.items():
            assert found.setdefault(expert_id, weights) == weights
    return found


def experts_of_rank(ep_size: int) -> dict[int, list[float]]:
    torch.manual_seed(3)
    layer = ds_hybrid.MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), EXPERTS, ep_size=ep_size)
    layer.set_deepspeed_parallelism()
    first = dist.get_rank() % ep_size * layer.num_local_experts
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    return {first + slot: e.weight.flatten()[:16].tolist() for slot, e in enumerate(experts)}


def output_error_with_placement(expert_of_slot: list[list[int]], mode: Mode) -> float:
    case, rank = Case((9, 5), {"k": 3}), dist.get_rank()
    layer, whole = make_layer(case, ep_size=2, mode=mode), make_layer(case, ep_size=1, mode=mode)
    layer.set_deepspeed_parallelism()
    layer.deepspeed_moe.placement = ExpertPlacement.from_slots(expert_of_slot)
    for slot, expert_id in enumerate(expert_of_slot[rank]):
        held = whole.deepspeed_moe.experts.deepspeed_experts[expert_id]
        layer.deepspeed_moe.experts.deepspeed_experts[slot] = held
    tokens, _, _ = make_tokens(case, rank)
    return relative_error(layer(tokens)[0].detach(), reference_of(whole, tokens, None).output.detach())


def message_of(ep_size: int) -> str:
    try:
        ds_hybrid.MoE(HIDDEN, expert, 12, ep_size=ep_size).set_deepspeed_parallelism()
    except ConfigError as error:
        return str(error)
    return "no error"


def evaluate_on_rank_0() -> tuple[int, ...] | None:
    layer = ds_hybrid.MoE(HIDDEN, expert, EXPERTS, k=2)
    layer.set_deepspeed_parallelism()
    layer.eval()
    return tuple(layer(torch.ones(12, HIDDEN))[0].shape) if dist.get_rank() == 0 else None
