"""Every dispatcher against a one-process dense MoE: outputs, and gradients of tokens, router weights and experts."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ds_hybrid.dispatch.arrived import by_rows
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.hierarchical import NodeGroups
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.modes import MODES, Mode, WireDtype
from ds_hybrid.dispatch.overlap import run_in_chunks
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.dispatch.switch import make_dispatcher
from ds_hybrid.errors import DispatchError
from ds_hybrid.placement import ExpertPlacement
from tests.dispatch.reference import Case, Inputs, dense_reference, expert, make_inputs, relative_error
from tests.ranks import RankPool

Checkpointing = Literal["off", "reentrant", "non_reentrant"]

CASES = {
    "two ranks": Case((6, 6), num_experts=8, top_k=2),
    "three ranks": Case((5, 5, 5), num_experts=6, top_k=3),
    "four ranks": Case((7, 7, 7, 7), num_experts=16, top_k=4),
    "unequal tokens": Case((9, 1, 4, 6), num_experts=8, top_k=2),
    "a rank without tokens": Case((5, 0, 3), num_experts=6, top_k=2),
    "only one rank has tokens": Case((0, 0, 0, 4), num_experts=8, top_k=3),
    "no tokens at all": Case((0, 0), num_experts=4, top_k=2),
    "top-1": Case((8, 8, 8), num_experts=9, top_k=1),
    "every expert": Case((4, 4), num_experts=4, top_k=4),
    "one expert per rank": Case((6, 6, 6, 6), num_experts=4, top_k=2),
    "experts without a token": Case((2, 2), num_experts=32, top_k=2),
    "everything to few experts": Case((12, 12, 12, 12), num_experts=16, top_k=2, skew=6.0),
    "more than 256 experts": Case((6, 5, 4), num_experts=300, top_k=8),
    "odd hidden size": Case((5, 7), num_experts=4, top_k=3, hidden_size=5),
}
SPANNING = [*MODES, "hierarchical"]
"""The modes that bring different tokens together; ``hierarchical`` runs on four ranks."""

NODE_OF_RANK = (0, 1, 1, 0)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize("mode", SPANNING)
@pytest.mark.parametrize("name", CASES)
def test_equals_dense_reference(four_ranks: RankPool, mode: Mode, name: str, dtype: torch.dtype) -> None:
    case = replace(CASES[name], dtype=dtype)
    if mode == "hierarchical" and case.num_ranks != 4:
        case = replace(case, num_tokens=(*case.num_tokens, 5, 0)[:4], num_experts=-(-case.num_experts // 4) * 4)
    for seed in range(2):
        for errors in four_ranks.run(compare, mode, replace(case, seed=seed), "off"):
            assert all(error <= TOLERANCE[dtype] for error in errors.values()), errors


@pytest.mark.parametrize("checkpointing", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize("mode", SPANNING)
@pytest.mark.parametrize("name", ["unequal tokens", "four ranks"])
def test_activation_checkpointing_changes_nothing(
    four_ranks: RankPool, mode: Mode, name: str, checkpointing: Checkpointing
) -> None:
    for same in four_ranks.run(checkpointing_changes_nothing, mode, CASES[name], checkpointing):
        assert same


@pytest.mark.parametrize("num_chunks", [2, 3, 5])
@pytest.mark.parametrize("mode", [*SPANNING, "replicated"])
def test_chunks_change_nothing_but_the_order_of_messages(four_ranks: RankPool, mode: Mode, num_chunks: int) -> None:
    case = replace(CASES["unequal tokens"], num_tokens=(7, 7, 7, 7) if mode == "replicated" else (9, 1, 4, 6))
    for difference in four_ranks.run(effect_of_chunks, mode, case, num_chunks):
        assert difference <= 1e-12


@pytest.mark.parametrize("mode", SPANNING)
def test_bfloat16_is_close_to_the_reference(four_ranks: RankPool, mode: Mode) -> None:
    case = Case((33, 20, 0, 7), num_experts=8, top_k=3, dtype=torch.bfloat16)
    for errors in four_ranks.run(compare, mode, case, "off"):
        assert all(error <= 2e-2 for error in errors.values()), errors


@pytest.mark.parametrize("mode", SPANNING)
def test_float32_weights_meet_bfloat16_rows_unrounded(four_ranks: RankPool, mode: Mode) -> None:
    case = Case((33, 20, 0, 7), num_experts=8, top_k=1, dtype=torch.bfloat16)
    for output, weights in four_ranks.run(combine_of_threes, mode, case):
        assert torch.equal(output, (3 * weights).to(torch.bfloat16).expand(output.shape))
        rounded_first = (3 * weights.to(torch.bfloat16).float()).to(torch.bfloat16)
        assert not len(weights) or not torch.equal(output[:, :1], rounded_first)


@pytest.mark.parametrize("mode", SPANNING)
def test_no_uninitialised_value_is_read(four_ranks: RankPool, mode: Mode) -> None:
    for name in ("unequal tokens", "only one rank has tokens", "one expert per rank"):
        for errors in four_ranks.run(compare_over_nan, mode, CASES[name]):
            assert all(error <= TOLERANCE[torch.float64] for error in errors.values()), errors


@pytest.mark.parametrize("mode", SPANNING)
@pytest.mark.parametrize(("wire_dtype", "tolerance"), [("bf16", 5e-3), ("fp8_e4m3", 6e-2)])
def test_rounding_on_the_wire_is_bounded(
    four_ranks: RankPool, mode: Mode, wire_dtype: WireDtype, tolerance: float
) -> None:
    """Rounded in forward only: what is not a function of rounded tokens alone stays close to the reference."""
    case = Case((33, 20, 0, 7), num_experts=8, top_k=3, hidden_size=160, dtype=torch.float32)
    for errors in four_ranks.run(compare, mode, case, "off", 1.0, wire_dtype):
        assert all(error <= tolerance for error in errors.values()), errors
        assert not errors or errors["output"] == 0.0 or errors["output"] > TOLERANCE[torch.float32], errors


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_replicated_equals_dense_reference_on_every_rank(
    four_ranks: RankPool, num_ranks: int, dtype: torch.dtype
) -> None:
    case = Case((9,) * num_ranks, num_experts=12, top_k=3, dtype=dtype)
    for errors in four_ranks.run(compare_replicated, case):
        assert all(error <= TOLERANCE[dtype] for error in errors.values()), errors


def test_replicated_refuses_different_tokens(four_ranks: RankPool) -> None:
    messages = four_ranks.run(message_of_unequal_tokens)
    assert (
        messages
        == [
            "layer under test: the ranks have 7, 7, 6, 7 tokens. Replicated dispatch needs the same tokens on every "
            "rank of the expert-parallel group."
        ]
        * 4
    )


def test_broken_dispatcher_is_caught(four_ranks: RankPool) -> None:
    case = replace(CASES["four ranks"], dtype=torch.float32)
    worst = [max(errors.values()) for errors in four_ranks.run(compare, "two_stage", case, "off", 1.001)]
    assert min(worst) > 10 * TOLERANCE[torch.float32]


def test_alltoall_does_not_depend_on_the_placement_bit_for_bit(four_ranks: RankPool) -> None:
    case = replace(CASES["four ranks"], dtype=torch.float32)
    for outputs in four_ranks.run(outputs_under_placements, "alltoall", case, 5):
        assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("mode", SPANNING)
@pytest.mark.parametrize("fact", ["hidden size", "dtype", "top-k", "placement digest"])
def test_disagreement_raises_the_same_error_on_every_rank(four_ranks: RankPool, mode: Mode, fact: str) -> None:
    messages = four_ranks.run(message_of_disagreement, mode, fact, limit=30)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"layer under test: expert-parallel ranks 0 and 2 disagree on the {fact}: ")


def test_ranks_in_different_modes_raise_the_same_error(four_ranks: RankPool) -> None:
    """Where both modes begin with the same message, as all but ``alltoall`` do."""
    message = (
        "layer under test: expert-parallel ranks 0 and 2 disagree on the mode: two_stage and allgather. "
        "Every rank must build the same model from the same ds_config."
    )
    assert four_ranks.run(message_of_disagreement, "two_stage", "mode", limit=30) == [message] * 4


@pytest.mark.parametrize("mode", [*SPANNING, "replicated"])
def test_a_fault_of_one_rank_stops_all(four_ranks: RankPool, mode: Mode) -> None:
    messages = four_ranks.run(message_of_fault, mode, limit=30)
    theirs = "layer under test: expert-parallel rank 2 was given what it cannot dispatch. Its own message tells what."
    assert messages == [
        theirs,
        theirs,
        "layer under test: 7 tokens but 6 rows of routing: must be equal.",
        theirs,
    ]


@pytest.mark.parametrize("mode", ["two_stage", "alltoall"])
def test_a_rank_that_does_not_come_is_named(four_ranks: RankPool, mode: Mode) -> None:
    """U4: within the group's time limit; the rank is alive and busy with something else."""
    *messages, absent = four_ranks.run(message_of_absence, mode, limit=60)
    assert absent == "did something else"
    for message in messages:
        assert message.startswith(
            "layer under test: ranks 3 of the expert-parallel group [0, 1, 2, 3] did not come to its exchange. "
        )


def rank_group(num_ranks: int) -> RankGroup | None:
    """The group of ranks 0..num_ranks-1, or None on the others."""
    process_group = _subgroup(tuple(range(num_ranks)))
    return RankGroup(process_group, Meter()) if dist.get_rank() < num_ranks else None


def make(mode: Mode, group: RankGroup, *, wire_dtype: WireDtype = "auto", guard: bool = True) -> Dispatcher:
    """The dispatcher of that name; ``hierarchical`` over two nodes of two ranks each."""
    nodes = node_groups(group) if mode == "hierarchical" else None
    return make_dispatcher(mode, group, layer="layer under test", guard=guard, wire_dtype=wire_dtype, nodes=nodes)


def node_groups(group: RankGroup) -> NodeGroups:
    """Of four ranks, of which 0 and 3 are on one node and 1 and 2 on the other."""
    across, inside = ([0, 1], [2, 3]), ([0, 3], [1, 2])
    process_groups = {tuple(ranks): _subgroup(tuple(ranks)) for ranks in (*across, *inside)}

    def of_this_rank(lists: tuple[list[int], list[int]]) -> RankGroup:
        (ranks,) = (tuple(ranks) for ranks in lists if group.rank in ranks)
        return RankGroup(process_groups[ranks], group.meter)

    return NodeGroups(NODE_OF_RANK, of_this_rank(across), of_this_rank(inside))


@functools.cache
def _subgroup(ranks: tuple[int, ...]) -> Any:
    return dist.new_group(list(ranks))


def random_placement(case: Case) -> ExpertPlacement:
    order = np.random.default_rng(case.seed).permutation(case.num_experts)
    return ExpertPlacement.from_slots(order.reshape(case.num_ranks, -1))


def local_experts(rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    parts = zip(rows.split(counts.tolist()), weights, strict=True)
    return torch.cat([expert(part, weight) for part, weight in parts])


def run_layer(
    dispatcher: Dispatcher,
    inputs: Inputs,
    placement: ExpertPlacement,
    rank: int,
    checkpointing: Checkpointing = "off",
    distortion: float = 1.0,
    num_chunks: int = 1,
) -> dict[str, torch.Tensor]:
    """Output and gradients of this rank, and the gradient of its experts."""
    tokens = inputs.tokens[rank].clone().requires_grad_()
    weights = inputs.topk_weights[rank].clone().requires_grad_()
    experts = inputs.expert_weights[placement.expert_of_slot[rank]].clone().requires_grad_()
    num_experts = len(inputs.expert_weights)

    def layer(tokens: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        routing = Routing(inputs.topk_ids[rank], weights, num_experts)

        @by_rows
        def run_experts(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            return local_experts(rows, counts, experts) * distortion

        return run_in_chunks(dispatcher, tokens, routing, placement, run_experts, num_chunks=num_chunks)

    if checkpointing == "off":
        output = layer(tokens, weights, experts)
    else:
        output = checkpoint(layer, tokens, weights, experts, use_reentrant=checkpointing == "reentrant")
    output.backward(inputs.upstream[rank])
    assert tokens.grad is not None
    assert weights.grad is not None
    assert experts.grad is not None
    return {
        "output": output.detach(),
        "tokens": tokens.grad,
        "router weights": weights.grad,
        "experts": experts.grad,
    }


def compare(
    mode: Mode,
    case: Case,
    checkpointing: Checkpointing,
    distortion: float = 1.0,
    wire_dtype: WireDtype = "auto",
) -> dict[str, float]:
    """Relative errors of this rank against the dense reference; nothing on ranks outside the group."""
    group = rank_group(case.num_ranks)
    if group is None:
        return {}
    inputs, placement = make_inputs(case), random_placement(case)
    expected = dense_reference(inputs)
    dispatcher = make(mode, group, wire_dtype=wire_dtype)
    actual = run_layer(dispatcher, inputs, placement, group.rank, checkpointing, distortion)
    wanted = {
        "output": expected.outputs[group.rank],
        "tokens": expected.grad_tokens[group.rank],
        "router weights": expected.grad_topk_weights[group.rank],
        "experts": expected.grad_experts[placement.expert_of_slot[group.rank]],
    }
    return {name: _error(actual[name], wanted[name], expected.grad_experts) for name in wanted}


def effect_of_chunks(mode: Mode, case: Case, num_chunks: int) -> float:
    """The largest difference of any result between one chunk and several. Every rank has rank 0's tokens in mode
    ``replicated``, its own in the others.
    """
    group = rank_group(case.num_ranks)
    assert group is not None
    inputs, placement = make_inputs(case), random_placement(case)
    if mode == "replicated":
        inputs = _shared(inputs, case.num_ranks)
    one, several = (run_layer(make(mode, group), inputs, placement, group.rank, "off", 1.0, n) for n in (1, num_chunks))
    errors = [relative_error(several[name], one[name]) for name in one if one[name].any()]
    assert all(several[name].isfinite().all() for name in several)
    return max(errors, default=0.0)


def _shared(inputs: Inputs, num_ranks: int) -> Inputs:
    """Rank 0's tokens on every rank."""
    return replace(
        inputs,
        tokens=inputs.tokens[:1] * num_ranks,
        topk_ids=inputs.topk_ids[:1] * num_ranks,
        topk_weights=inputs.topk_weights[:1] * num_ranks,
        upstream=inputs.upstream[:1] * num_ranks,
    )


def compare_replicated(case: Case) -> dict[str, float]:
    """Every rank has rank 0's tokens, and ends with their whole gradients."""
    group = rank_group(case.num_ranks)
    if group is None:
        return {}
    shared, placement = make_inputs(replace(case, num_tokens=case.num_tokens[:1])), random_placement(case)
    expected = dense_reference(shared)
    inputs = _shared(shared, group.size)
    actual = run_layer(make("replicated", group), inputs, placement, group.rank)
    wanted = {
        "output": expected.outputs[0],
        "tokens": expected.grad_tokens[0],
        "router weights": expected.grad_topk_weights[0],
        "experts": expected.grad_experts[placement.expert_of_slot[group.rank]],
    }
    return {name: _error(actual[name], wanted[name], expected.grad_experts) for name in wanted}


def message_of_unequal_tokens() -> str:
    group = rank_group(4)
    assert group is not None
    case = Case((7, 7, 6, 7), num_experts=8, top_k=2)
    with pytest.raises(DispatchError) as error:
        run_layer(make("replicated", group), make_inputs(case), random_placement(case), group.rank)
    return str(error.value)


def compare_over_nan(mode: Mode, case: Case) -> dict[str, float]:
    """As compare, with every buffer that is allocated without a value full of NaN."""

    def new_nan(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        buffer = self.new_zeros(*args, **kwargs)
        return buffer.fill_(float("nan") if buffer.is_floating_point() else 127)

    def empty_nan_like(other: torch.Tensor) -> torch.Tensor:
        return new_nan(other, other.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", new_nan)
        patch.setattr(torch, "empty_like", empty_nan_like)
        return compare(mode, case, "off")


def _error(actual: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> float:
    """Relative, or absolute on the scale of all experts where the expected value is zero (experts without a token)."""
    if expected.numel() and not expected.any() and actual.isfinite().all():
        return float(actual.abs().max() / scale.abs().max().clamp_min(1e-30))
    return relative_error(actual, expected)


def checkpointing_changes_nothing(mode: Mode, case: Case, checkpointing: Checkpointing) -> bool:
    group = rank_group(case.num_ranks)
    if group is None:
        return True
    inputs, placement = make_inputs(case), random_placement(case)
    dispatcher = make(mode, group)
    plain = run_layer(dispatcher, inputs, placement, group.rank)
    recomputed = run_layer(dispatcher, inputs, placement, group.rank, checkpointing)
    return all(torch.equal(plain[name], recomputed[name]) for name in plain)


def combine_of_threes(mode: Mode, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The output when every expert answers 3, and the weights."""
    group = rank_group(case.num_ranks)
    assert group is not None
    inputs, placement = make_inputs(case), random_placement(case)
    weights = inputs.topk_weights[group.rank]
    dispatcher = make(mode, group)
    routing = Routing(inputs.topk_ids[group.rank], weights, case.num_experts)
    threes = by_rows(lambda rows, counts: torch.full_like(rows, 3.0))
    tokens = inputs.tokens[group.rank]
    return run_in_chunks(dispatcher, tokens, routing, placement, threes, num_chunks=1), weights


def outputs_under_placements(mode: Mode, case: Case, num_placements: int) -> list[torch.Tensor]:
    group = rank_group(case.num_ranks)
    assert group is not None
    inputs = make_inputs(case)
    dispatcher = make(mode, group)
    placements = [random_placement(replace(case, seed=seed)) for seed in range(num_placements)]
    return [run_layer(dispatcher, inputs, placement, group.rank)["output"] for placement in placements]


def message_of_absence(mode: Mode) -> str:
    """Rank 3 makes no call."""
    process_group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 3:
        time.sleep(10)
        return "did something else"
    case = CASES["four ranks"]
    dispatcher = make(mode, RankGroup(process_group, Meter()))
    with pytest.raises(DispatchError) as error:
        run_layer(dispatcher, make_inputs(case), random_placement(case), dist.get_rank())
    return str(error.value)


def message_of_fault(mode: Mode) -> str:
    """Rank 2 has a row of routing too few."""
    group = rank_group(4)
    assert group is not None
    case = CASES["four ranks"]
    inputs = make_inputs(case)
    num_routed = 6 if group.rank == 2 else 7
    ids, weights = inputs.topk_ids[group.rank][:num_routed], inputs.topk_weights[group.rank][:num_routed]
    with pytest.raises(DispatchError) as error:
        make(mode, group).plan(
            inputs.tokens[group.rank], Routing(ids, weights, case.num_experts), random_placement(case)
        )
    return str(error.value)


def message_of_disagreement(mode: Mode, fact: str) -> str:
    """Rank 2 differs from the others in one fact."""
    group = rank_group(4)
    assert group is not None
    case = CASES["four ranks"]
    placement = ExpertPlacement.contiguous(case.num_experts, case.num_ranks)
    if group.rank == 2:
        changes: dict[str, Case] = {
            "hidden size": replace(case, hidden_size=8),
            "dtype": replace(case, dtype=torch.float32),
            "top-k": replace(case, top_k=3),
        }
        case = changes.get(fact, case)
        if fact == "mode":
            mode = "allgather"
        if fact == "placement digest":
            placement = random_placement(case)
    inputs = make_inputs(case)
    dispatcher = make(mode, group)
    routing = Routing(inputs.topk_ids[group.rank], inputs.topk_weights[group.rank], case.num_experts)
    try:
        dispatcher.plan(inputs.tokens[group.rank], routing, placement)
    except DispatchError as error:
        return str(error)
    return "no error"
