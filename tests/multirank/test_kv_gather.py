"""Attention over shards on real ranks equals full attention on one process; what leaves is what the formulas say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import deepspeed.comm as dist
import pytest
import torch
from measure import ExchangeCounter
from torch.nn.functional import scaled_dot_product_attention

from ds_hybrid.attention import gathering
from ds_hybrid.attention.choose import Schedule
from ds_hybrid.attention.kv_gather import KVGatherAttention
from ds_hybrid.attention.shards import Shards
from ds_hybrid.attention.traffic import KVShape, backward_bytes, forward_bytes
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.modes import WireDtype
from ds_hybrid.dispatch.wire import decode, encode
from tests.attention.reference import Case, Result, full_attention, make_tensors
from tests.ranks import RankPool

NUM_RANKS = (2, 3, 4, 8)
SCHEDULES = {
    "whole": Schedule("whole", num_pieces=2),
    "blocks": Schedule("blocks", num_pieces=3, in_flight=2),
    "blocks, some kept": Schedule("blocks", num_pieces=4, in_flight=1, keep_bytes=30_000),
    "ring": Schedule("ring"),
}
CASES = {
    "causal": Case(96),
    "bidirectional": Case(96, causal=False, order="consecutive"),
    "window": Case(200, window=17),
    "bidirectional window": Case(200, causal=False, window=23, order="consecutive"),
    "padded": Case(96, documents="padded"),
    "bidirectional, padded": Case(101, causal=False, documents="padded", order="consecutive"),
    "packed": Case(150, documents="packed"),
    "packed, in a window": Case(150, documents="packed", window=9),
    "GQA 8:1, 101 tokens": Case(101, num_heads=8, num_kv_heads=1),
    "GQA 8:1, packed, 89 tokens": Case(89, num_heads=8, num_kv_heads=1, documents="packed"),
    "GQA 6:2, bidirectional, values of another size": Case(
        61, causal=False, num_heads=6, num_kv_heads=2, value_head_dim=24, order="consecutive"
    ),
    "fewer tokens than chunks": Case(5),
    "masks of more than one tile": Case(1300, batch_size=1, num_heads=2, num_kv_heads=1, documents="packed"),
}


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_equals_full_attention(eight_ranks: RankPool, num_ranks: int, name: str) -> None:
    case = CASES[name]
    expected = full_attention(case, make_tensors(case))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        results = eight_ranks.run(run_schedules, num_ranks, case, dtype)[:num_ranks]
        for schedule in SCHEDULES:
            errors = joined([rank[schedule] for rank in results], case.shards(num_ranks)).errors(expected)
            assert max(errors.values()) <= tolerance, (schedule, dtype, errors)


@pytest.mark.parametrize("name", list(CASES)[:2])
def test_scores_that_are_not_all_held(eight_ranks: RankPool, name: str) -> None:
    """``"whole"`` leaves the rest to the fused kernel: with room for none, and for some."""
    case = CASES[name]
    expected = full_attention(case, make_tensors(case))
    for num_bytes in (0, 1):
        results = eight_ranks.run(run_whole, case, num_bytes)[:4]
        errors = joined(results, case.shards(4)).errors(expected)
        assert max(errors.values()) <= 1e-12, (num_bytes, errors)


def run_whole(case: Case, num_bytes: int) -> Result | None:
    group = group_of(4)
    if dist.get_rank() >= 4:
        return None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "SCORES_BYTES", num_bytes)
        return run_one(KVGatherAttention(RankGroup(group, Meter()), Schedule("whole")), case, torch.float64)


def joined(ranks: list[Result], shards: Shards) -> Result:
    fields = zip(*(vars(rank).values() for rank in ranks), strict=True)
    return Result(*(torch.cat(field, 2) for field in fields)).unsharded(shards)


def group_of(num_ranks: int) -> Any:
    """The first ranks; made anew by all ranks, who all call it."""
    return dist.new_group(list(range(num_ranks)))


def run_schedules(num_ranks: int, case: Case, dtype: torch.dtype) -> dict[str, Result] | None:
    """Every schedule on the first ranks; the others only help to make the group."""
    group = group_of(num_ranks)
    if dist.get_rank() >= num_ranks:
        return None
    ranks = RankGroup(group, Meter())
    return {name: run_one(KVGatherAttention(ranks, schedule), case, dtype) for name, schedule in SCHEDULES.items()}


def run_one(attention: KVGatherAttention, case: Case, dtype: torch.dtype) -> Result:
    num_ranks, rank = attention.group.size, attention.group.rank
    shards = case.shards(num_ranks)
    local = make_tensors(case).to(dtype).padded(shards.padded_length).shard(shards, rank)
    inputs = [x.requires_grad_() for x in (local.query, local.key, local.value)]
    output = attention(*inputs, case.sight(num_ranks, rank))
    return Result(output.detach(), *torch.autograd.grad(output, inputs, local.grad_output))


BYTES_CASE = Case(101, num_heads=8, num_kv_heads=2, value_head_dim=24)


@pytest.mark.parametrize("wire_dtype", ["auto", "bf16", "fp8_e4m3"])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_counted_bytes_equal_the_formulas(eight_ranks: RankPool, num_ranks: int, wire_dtype: WireDtype) -> None:
    """Of the meter, and of every collective and message that torch.distributed was asked for."""
    shape = KVShape(
        num_ranks,
        batch_size=BYTES_CASE.batch_size,
        shard_length=BYTES_CASE.shards(num_ranks).shard_length,
        num_kv_heads=BYTES_CASE.num_kv_heads,
        head_dim=BYTES_CASE.head_dim,
        value_head_dim=BYTES_CASE.value_head_dim,
        value_bytes=4,
        wire_dtype=wire_dtype,
    )
    for rank in eight_ranks.run(count, num_ranks, wire_dtype)[:num_ranks]:
        for name, counted in rank.items():
            schedule = SCHEDULES[name]
            kept = counted.num_kept_rows
            assert (kept > 0) == (schedule.keep_bytes > 0 or schedule.variant == "whole")
            backward = backward_bytes(schedule.variant, shape, num_kept_rows=kept)
            assert counted.seen == counted.meter == (forward_bytes(shape), backward), name


@dataclass(frozen=True)
class Counted:
    """Bytes that a rank sent, forward and backward, and the rows of a shard that it needed no second time."""

    seen: tuple[int, int]
    meter: tuple[int, int]
    num_kept_rows: int


def count(num_ranks: int, wire_dtype: WireDtype) -> dict[str, Counted] | None:
    group = group_of(num_ranks)
    if dist.get_rank() >= num_ranks:
        return None
    return {name: count_one(group, schedule, wire_dtype) for name, schedule in SCHEDULES.items()}


def count_one(group: Any, schedule: Schedule, wire_dtype: WireDtype) -> Counted:
    ranks = RankGroup(group, Meter())
    attention = KVGatherAttention(ranks, schedule, wire_dtype=wire_dtype)
    shards = BYTES_CASE.shards(ranks.size)
    local = make_tensors(BYTES_CASE).to(torch.float32).padded(shards.padded_length).shard(shards, ranks.rank)
    inputs = [x.requires_grad_() for x in (local.query, local.key, local.value)]
    seen, meter = [], []
    with ExchangeCounter() as forward:
        output = attention(*inputs, BYTES_CASE.sight(ranks.size, ranks.rank))
    meter.append(ranks.meter.take().payload)
    saved = output.grad_fn.saved_tensors[5:]  # type: ignore[union-attr]
    with ExchangeCounter() as backward:
        output.backward(local.grad_output)
    meter.append(ranks.meter.take().payload)
    seen = [sum(exchange.sent for exchange in counter.exchanges) for counter in (forward, backward)]
    kept = {"whole": saved[:1], "blocks": saved, "ring": ()}[schedule.variant]
    return Counted((seen[0], seen[1]), (meter[0], meter[1]), sum(len(wire) for wire in kept) // ranks.size)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fp8_differs_by_its_rounding_alone(eight_ranks: RankPool, schedule: str) -> None:
    """Exact with the keys and values of other ranks rounded, and with gradients that pass the rounding unchanged."""
    num_ranks, case = 4, Case(101, num_heads=8, num_kv_heads=2, head_dim=32, value_head_dim=40)
    shards, tensors = case.shards(num_ranks), make_tensors(case).to(torch.float32)
    ranks = eight_ranks.run(run_in_fp8, num_ranks, case, SCHEDULES[schedule])[:num_ranks]
    result = joined(ranks, shards)
    assert 1e-3 < max(result.errors(full_attention(case, tensors.to(torch.float64))).values()) < 0.1

    expected = [torch.zeros_like(x) for x in vars(result).values()]
    for rank in range(num_ranks):
        index = shards.index(rank)
        mine = torch.zeros(case.num_tokens, 1, dtype=torch.bool)
        mine[index[index < case.num_tokens]] = True
        seen_by_rank = replace(
            tensors,
            key=torch.where(mine, tensors.key, rounded(tensors.key)),
            value=torch.where(mine, tensors.value, rounded(tensors.value)),
            grad_output=torch.where(mine, tensors.grad_output, 0.0),
        ).to(torch.float64)
        part = full_attention(case, seen_by_rank)
        for total, x in zip(
            expected, (torch.where(mine, part.output, 0.0), *list(vars(part).values())[1:]), strict=True
        ):
            total += x
    assert max(result.errors(Result(*expected)).values()) <= 1e-5


def rounded(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return decode(encode(rows, "fp8_e4m3"), x.shape[-1], x.dtype, "fp8_e4m3").view_as(x)


def run_in_fp8(num_ranks: int, case: Case, schedule: Schedule) -> Result | None:
    group = group_of(num_ranks)
    if dist.get_rank() >= num_ranks:
        return None
    return run_one(KVGatherAttention(RankGroup(group, Meter()), schedule, wire_dtype="fp8_e4m3"), case, torch.float32)


def test_bfloat16_is_as_exact_as_one_kernel(eight_ranks: RankPool) -> None:
    """Sums over blocks are kept in float32: no worse than twice the error of full attention in bfloat16."""
    case = Case(256, num_heads=8, num_kv_heads=2, head_dim=32, value_head_dim=32)
    tensors = make_tensors(case).to(torch.bfloat16)
    exact = full_attention(case, tensors.to(torch.float64))
    inputs = [x.clone().requires_grad_() for x in (tensors.query, tensors.key, tensors.value)]
    output = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    whole = Result(output.detach(), *torch.autograd.grad(output, inputs, tensors.grad_output)).errors(exact)
    ranks = eight_ranks.run(run_schedules, 4, case, torch.bfloat16)[:4]
    for name in SCHEDULES:
        errors = joined([rank[name] for rank in ranks], case.shards(4)).errors(exact)
        assert all(errors[x] <= 2 * whole[x] for x in errors), (name, errors, whole)
