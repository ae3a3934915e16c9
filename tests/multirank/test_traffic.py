"""Bytes counted by wrapping torch's collectives equal the formulas and the meter, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ds_hybrid.dispatch.meter import WireBytes
from ds_hybrid.dispatch.modes import NUM_FACTS, Mode, WireDtype
from ds_hybrid.dispatch.traffic import Traffic, WireShape, backward_traffic, forward_traffic
from tests.dispatch.reference import Case, make_inputs
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


def test_fp8_takes_half_of_bf16_out_and_three_quarters_of_a_forward() -> None:
    """Of the values; the routing weights that ride along stay float32."""
    shape = WireShape(num_ranks=4, num_experts=64, top_k=8, hidden_size=1024, value_bytes=2)
    fp8 = replace(shape, wire_dtype="fp8_e4m3")
    assert fp8.dispatched_row_bytes / shape.dispatched_row_bytes <= 0.53
    rows = 2.7
    forward = [rows * (s.dispatched_row_bytes + s.row_bytes) for s in (fp8, shape)]
    assert forward[0] / forward[1] == pytest.approx(0.758, abs=1e-3)


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


@contextmanager
def counted_collectives() -> Iterator[list[int]]:
    """Note the bytes of each message that this rank sends to others while open, whoever calls torch.distributed."""
    sent: list[int] = []

    def all_to_all(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        **_: Any,
    ) -> None:
        size, me = dist.get_world_size(group), dist.get_rank(group)
        elements = input.numel() // size * (size - 1)
        if input_split_sizes:
            per_row = input[0].numel() if len(input) else 0
            elements = per_row * (sum(input_split_sizes) - input_split_sizes[me])
        sent.append(elements * input.element_size())

    def all_gather(output: Any, input: Any, group: Any = None, *_: Any, **__: Any) -> None:
        sent.append(input.numel() * input.element_size() * (dist.get_world_size(group) - 1))

    def all_reduce(tensor: Any, op: Any = None, group: Any = None, *_: Any, **__: Any) -> None:
        size = dist.get_world_size(group)
        sent.append(2 * tensor.numel() * tensor.element_size() * (size - 1) // size)

    originals = {}
    wrapped_names = {"all_to_all_single": all_to_all, "all_gather_single": all_gather, "all_reduce": all_reduce}
    for name, noted in wrapped_names.items():
        originals[name] = getattr(distributed_c10d, name)

        def wrapped(*args: Any, _noted: Any = noted, _original: Any = originals[name], **kwargs: Any) -> Any:
            _noted(*args, **kwargs)
            return _original(*args, **kwargs)

        setattr(distributed_c10d, name, wrapped)
        setattr(dist, name, wrapped)
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(distributed_c10d, name, original)
            setattr(dist, name, original)


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
