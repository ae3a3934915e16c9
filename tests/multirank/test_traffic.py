"""Bytes counted by wrapping torch's collectives equal the formulas and the meter, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ds_hybrid.dispatch.choose import make_dispatcher
from ds_hybrid.dispatch.meter import WireBytes
from ds_hybrid.dispatch.modes import MODES, Mode
from ds_hybrid.dispatch.traffic import Traffic, WireShape, backward_traffic, forward_traffic
from tests.dispatch.reference import Case, make_inputs
from tests.multirank.test_dispatchers import random_placement, rank_group, run_layer
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
    """Bytes of one forward and backward on one rank: seen under torch.distributed, and by the meter."""

    payload: int
    metadata: int
    meter: WireBytes


@pytest.mark.parametrize("guard", [True, False], ids=["guard", "no guard"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_counted_bytes_equal_the_formulas(four_ranks: RankPool, mode: Mode, name: str, dtype: str, guard: bool) -> None:
    case = CASES[name]
    counted = four_ranks.run(count, mode, case, DTYPES[dtype], guard)[: case.num_ranks]
    predicted = predict(mode, case, DTYPES[dtype], guard)
    assert [c.payload for c in counted] == sum(t.payload for t in predicted).tolist()
    assert [c.metadata for c in counted] == sum(t.metadata for t in predicted).tolist()
    assert [(c.meter.payload, c.meter.metadata) for c in counted] == [(c.payload, c.metadata) for c in counted]
    assert [c.meter.lower_bound for c in counted] == sum(t.lower_bound for t in predicted).tolist()
    assert [c.meter.num_tokens for c in counted] == list(case.num_tokens)


@pytest.mark.parametrize("name", CASES)
def test_two_stage_rows_equal_the_lower_bound(four_ranks: RankPool, name: str) -> None:
    """Payload less the riding weights is the bound exactly; routing costs at most K x 8 bytes per token and peer."""
    case = CASES[name]
    counted = four_ranks.run(count, "two_stage", case, torch.float32, True)[: case.num_ranks]
    row, riding = case.hidden_size * 4, case.top_k * 4
    payload = sum(c.payload for c in counted)
    lower_bound = sum(c.meter.lower_bound for c in counted)
    rows_one_way = lower_bound // (4 * row)
    assert payload == lower_bound + 2 * rows_one_way * riding
    if min(case.num_tokens) > 8:
        per_token_and_peer = sum(c.metadata for c in counted) / (sum(case.num_tokens) * (case.num_ranks - 1))
        assert per_token_and_peer <= case.top_k * 8


def test_two_stage_total_stays_within_a_twentieth_of_the_bound(four_ranks: RankPool) -> None:
    """bf16, hidden size 256, top-8 on 4 ranks: the riding weights, the ids and the headers are all in."""
    case = Case((512, 512, 512, 512), num_experts=64, top_k=8, hidden_size=256)
    counted = four_ranks.run(count, "two_stage", case, torch.bfloat16, True)
    sent = sum(c.payload + c.metadata for c in counted)
    assert sent / sum(c.meter.lower_bound for c in counted) <= 1.05


def count(mode: Mode, case: Case, dtype: torch.dtype, guard: bool) -> Counted | None:
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
    dispatcher = make_dispatcher(mode, group, layer="layer under test", guard=guard)
    with counted_collectives() as sent:
        run_layer(dispatcher, cast, placement, group.rank)
    return Counted(sent["payload"], sent["metadata"], group.meter.read())


def predict(mode: Mode, case: Case, dtype: torch.dtype, guard: bool) -> tuple[Traffic, Traffic]:
    placement = random_placement(case)
    ranks = [placement.rank_of_expert[ids.numpy()] for ids in make_inputs(case).topk_ids]
    shape = WireShape(
        num_ranks=case.num_ranks,
        num_experts=case.num_experts,
        top_k=case.top_k,
        hidden_size=case.hidden_size,
        value_bytes=dtype.itemsize,
        num_facts=5 if guard else 0,
    )
    return forward_traffic(mode, ranks, shape), backward_traffic(mode, ranks, shape)


@contextmanager
def counted_collectives() -> Iterator[dict[str, int]]:
    """Add up what this rank sends to others while open, under every caller of torch.distributed."""
    sent = {"payload": 0, "metadata": 0}

    def note(tensor: torch.Tensor, num_bytes: int, *, is_split: bool = False) -> None:
        is_rows = tensor.is_floating_point() or is_split
        sent["payload" if is_rows else "metadata"] += num_bytes

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
        note(input, elements * input.element_size(), is_split=bool(input_split_sizes))

    def all_gather(output: Any, input: Any, group: Any = None, *_: Any, **__: Any) -> None:
        note(input, input.numel() * input.element_size() * (dist.get_world_size(group) - 1))

    originals = {}
    for name, noted in {"all_to_all_single": all_to_all, "all_gather_single": all_gather}.items():
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
    assert four_ranks.run(count_known) == [(4 * 3 * 5, 8 * 3 * 2)] * 4


def count_known() -> tuple[int, int]:
    with counted_collectives() as sent:
        gathered = torch.empty(4 * 5)
        dist.all_gather_single(gathered, torch.ones(5))
        received = torch.empty((4, 2), dtype=torch.int64)
        dist.all_to_all_single(received, torch.ones((4, 2), dtype=torch.int64))
    return sent["payload"], sent["metadata"]


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
