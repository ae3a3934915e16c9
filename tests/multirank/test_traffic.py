"""Bytes counted by wrapping torch's collectives equal the formulas and the meter, to the byte."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ds_hybrid.dispatch.arrived import by_rows
from ds_hybrid.dispatch.meter import WireBytes
from ds_hybrid.dispatch.modes import NUM_FACTS, Mode, WireDtype
from ds_hybrid.dispatch.overlap import run_in_chunks
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.dispatch.traffic import Traffic, WireShape, backward_traffic, forward_traffic
from ds_hybrid.placement import ExpertPlacement
from tests.dispatch.reference import Case, make_inputs
from tests.multirank.sent_bytes import counted_collectives
from tests.multirank.test_dispatchers import (
    NODE_OF_RANK,
    SPANNING,
    make,
    random_placement,
    rank_group,
    run_layer,
)
from tests.ranks import RankPool

CASES = {
    "uniform": Case((64, 64, 64, 64), num_experts=16, top_k=4, hidden_size=32),
    "skewed": Case((64, 64, 64, 64), num_experts=16, top_k=2, hidden_size=32, skew=1.2),
    "unequal tokens, 300 experts": Case((40, 0, 13), num_experts=300, top_k=8, hidden_size=24, skew=1.0),
    "top-1 on two ranks": Case((50, 50), num_experts=8, top_k=1, hidden_size=32),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Counted:
    """Bytes of one forward and backward on one rank: all that was seen under torch.distributed, and by the meter."""

    seen: int
    meter: WireBytes


@pytest.mark.parametrize("guard", [True, False], ids=["guard", "no guard"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", SPANNING)
def test_counted_bytes_equal_the_formulas(four_ranks: RankPool, mode: Mode, name: str, dtype: str, guard: bool) -> None:
    case = CASES[name]
    if mode == "hierarchical" and case.num_ranks != 4:
        case = replace(case, num_tokens=(*case.num_tokens, 5, 0)[:4])
    counted = four_ranks.run(count, mode, case, DTYPES[dtype], guard)[: case.num_ranks]
    predicted = predict(mode, case, DTYPES[dtype], guard)
    assert [c.seen for c in counted] == sum(t.payload + t.metadata for t in predicted).tolist()
    assert [c.meter.payload for c in counted] == sum(t.payload for t in predicted).tolist()
    assert [c.meter.metadata for c in counted] == sum(t.metadata for t in predicted).tolist()
    assert [c.meter.lower_bound for c in counted] == sum(t.lower_bound for t in predicted).tolist()
    assert [c.meter.num_tokens for c in counted] == list(case.num_tokens)


@pytest.mark.parametrize("wire_dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("mode", SPANNING)
def test_rounded_rows_are_counted_as_they_travel(four_ranks: RankPool, mode: Mode, wire_dtype: WireDtype) -> None:
    case = replace(CASES["skewed"], hidden_size=200)
    counted = four_ranks.run(count, mode, case, torch.float32, True, wire_dtype)
    predicted = predict(mode, case, torch.float32, True, wire_dtype)
    assert [c.seen for c in counted] == sum(t.payload + t.metadata for t in predicted).tolist()


def test_replicated_sends_nothing_but_its_reductions(four_ranks: RankPool) -> None:
    case = Case((64,) * 4, num_experts=16, top_k=4, hidden_size=32)
    counted = four_ranks.run(count, "replicated", case, torch.float32, True)
    predicted = predict("replicated", case, torch.float32, True)
    assert [c.seen for c in counted] == sum(t.payload + t.metadata for t in predicted).tolist()
    assert [c.meter.lower_bound for c in counted] == [0] * 4


@pytest.mark.parametrize(
    ("hidden_size", "least", "most", "forward"),
    [
        (1024, 0.52, 0.53, 0.76),
        (256, 0.53, 0.55, 0.77),  # a known limit: 8 float32 weights ride along, 32 bytes beside 264 of values
    ],
)
def test_fp8_takes_half_of_bf16_out_and_three_quarters_of_a_forward(
    four_ranks: RankPool, hidden_size: int, least: float, most: float, forward: float
) -> None:
    """Top-8 of 64 experts: tokens with their riding weights, and the whole forward with ids and headers."""
    wires: tuple[WireDtype, ...] = ("fp8_e4m3", "auto")
    fp8, bf16 = (np.sum(four_ranks.run(forward_messages, hidden_size, wire), axis=0) for wire in wires)
    header, ids, dispatched, combined = range(4)
    assert least < fp8[dispatched] / bf16[dispatched] <= most
    assert fp8[[header, ids, combined]].tolist() == bf16[[header, ids, combined]].tolist()
    assert fp8.sum() / bf16.sum() == pytest.approx(forward, abs=0.01)


@pytest.mark.parametrize("name", CASES)
def test_two_stage_rows_equal_the_lower_bound(four_ranks: RankPool, name: str) -> None:
    """Payload less the riding weights is the bound exactly; routing costs at most K x 8 bytes per token and peer."""
    case = CASES[name]
    counted = four_ranks.run(count, "two_stage", case, torch.float32, True)[: case.num_ranks]
    row, riding = case.hidden_size * 4, case.top_k * 4
    payload = sum(c.meter.payload for c in counted)
    lower_bound = sum(c.meter.lower_bound for c in counted)
    rows_one_way = lower_bound // (4 * row)
    assert payload == lower_bound + 2 * rows_one_way * riding
    if min(case.num_tokens) > 8:
        per_token_and_peer = sum(c.meter.metadata for c in counted) / (sum(case.num_tokens) * (case.num_ranks - 1))
        assert per_token_and_peer <= case.top_k * 8


def test_two_stage_total_stays_within_a_twentieth_of_the_bound(four_ranks: RankPool) -> None:
    """bf16, hidden size 256, top-8 on 4 ranks: the riding weights, the ids and the headers are all in."""
    case = Case((512, 512, 512, 512), num_experts=64, top_k=8, hidden_size=256)
    counted = four_ranks.run(count, "two_stage", case, torch.bfloat16, True)
    assert sum(c.seen for c in counted) / sum(c.meter.lower_bound for c in counted) <= 1.05


def count(mode: Mode, case: Case, dtype: torch.dtype, guard: bool, wire_dtype: WireDtype = "auto") -> Counted | None:
    group = rank_group(case.num_ranks)
    if group is None:
        return None
    inputs, placement = make_inputs(case), random_placement(case)
    cast = type(inputs)(
        [t.to(dtype) for t in inputs.tokens],
        inputs.topk_ids,
        [w.float() for w in inputs.topk_weights],
        inputs.expert_weights.to(dtype),
        [u.to(dtype) for u in inputs.upstream],
    )
    dispatcher = make(mode, group, guard=guard, wire_dtype=wire_dtype)
    with counted_collectives() as sent:
        run_layer(dispatcher, cast, placement, group.rank)
    return Counted(sum(sent), group.meter.take())


def forward_messages(hidden_size: int, wire_dtype: WireDtype) -> list[int]:
    """The bytes of each message of a forward over bfloat16 tokens in mode ``two_stage``."""
    group = rank_group(4)
    assert group is not None
    generator = torch.Generator().manual_seed(group.rank)
    ids = torch.rand(64, 64, generator=generator).argsort(1)[:, :8]
    routing = Routing(ids, torch.rand(ids.shape, generator=generator), 64)
    tokens = torch.randn(64, hidden_size, generator=generator).bfloat16()
    dispatcher, placement = make("two_stage", group, wire_dtype=wire_dtype), ExpertPlacement.contiguous(64, 4)
    with counted_collectives() as sent:
        run_in_chunks(dispatcher, tokens, routing, placement, by_rows(lambda rows, _: rows), num_chunks=1)
    return sent


def predict(
    mode: Mode, case: Case, dtype: torch.dtype, guard: bool, wire_dtype: WireDtype = "auto"
) -> tuple[Traffic, Traffic]:
    placement = random_placement(case)
    ranks = [placement.rank_of_expert[ids.numpy()] for ids in make_inputs(case).topk_ids]
    shape = WireShape(
        num_ranks=case.num_ranks,
        num_experts=case.num_experts,
        top_k=case.top_k,
        hidden_size=case.hidden_size,
        value_bytes=dtype.itemsize,
        num_facts=NUM_FACTS if guard else 0,
        wire_dtype=wire_dtype,
    )
    return (
        forward_traffic(mode, ranks, shape, node_of_rank=NODE_OF_RANK),
        backward_traffic(mode, ranks, shape, node_of_rank=NODE_OF_RANK),
    )


def test_the_wrapper_sees_every_collective(four_ranks: RankPool) -> None:
    """A control: the counter is not blind, and a byte too many is seen."""
    assert four_ranks.run(count_known) == [[4 * 3 * 5, 8 * 3 * 2]] * 4


def count_known() -> list[int]:
    with counted_collectives() as sent:
        gathered = torch.empty(4 * 5)
        dist.all_gather_single(gathered, torch.ones(5))
        received = torch.empty((4, 2), dtype=torch.int64)
        dist.all_to_all_single(received, torch.ones((4, 2), dtype=torch.int64))
    return sent


def test_expected_rows_match_the_mean_of_drawn_routing() -> None:
    from ds_hybrid.dispatch.traffic import expected_rows

    rng = np.random.default_rng(0)
    for num_ranks, num_experts, top_k in [(2, 16, 2), (4, 64, 8), (8, 32, 4)]:
        ids = np.argsort(rng.random((20000, num_experts)), axis=1)[:, :top_k]
        ranks = ids // (num_experts // num_ranks)
        remote = [(ranks == rank) for rank in range(1, num_ranks)]
        sizes = {"num_ranks": num_ranks, "num_experts": num_experts, "top_k": top_k}
        assert expected_rows("two_stage", **sizes) == pytest.approx(sum(r.any(1).mean() for r in remote), rel=0.01)
        assert expected_rows("alltoall", **sizes) == pytest.approx(sum(r.sum(1).mean() for r in remote), rel=0.01)
        assert expected_rows("allgather", **sizes) == num_ranks - 1
        nodes = ids // (num_experts // 2)
        across = (nodes == 1).any(1).mean()
        inside = [r.any(1).mean() for r in remote]
        hierarchical = across + sum(inside) * (num_ranks - 2) / (num_ranks - 1)
        assert expected_rows("hierarchical", num_nodes=2, **sizes) == pytest.approx(hierarchical, rel=0.01)
