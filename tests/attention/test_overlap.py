"""What hides under compute, on a virtual clock: the real schedules, with links and products that take stated times.

The unit is the product of a rank's queries with all keys. rho is the time to gather all keys, in that unit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ds_hybrid.attention.choose import AttentionShape, Clock, Schedule, Timeline, forecast
from ds_hybrid.attention.kv_gather import KVGatherAttention
from ds_hybrid.attention.traffic import KVShape, gathered_bytes
from ds_hybrid.dispatch.predict import GroupSpeed
from tests.attention.mirror import Mirror, TimedKernel
from tests.attention.reference import Case, make_tensors

SCHEDULES = {
    "whole": Schedule("whole"),
    "blocks": Schedule("blocks"),
    "blocks, all kept": Schedule("blocks", keep_bytes=2**40),
    "blocks, half kept": Schedule("blocks", keep_bytes=2**20),
    "ring": Schedule("ring"),
}
BIDIRECTIONAL = Case(
    512, causal=False, order="consecutive", batch_size=1, num_heads=8, num_kv_heads=8, head_dim=64, value_head_dim=64
)
CAUSAL = replace(BIDIRECTIONAL, causal=True, order="balanced")


def layer(case: Case, num_ranks: int) -> AttentionShape:
    length = case.shards(num_ranks).shard_length
    kv = KVShape(num_ranks, 1, length, case.num_kv_heads, case.head_dim, case.value_head_dim, 4)
    return AttentionShape(kv, case.num_heads, case.causal)


def speed_of(case: Case, num_ranks: int, rho: float, latency: float = 0.0) -> tuple[GroupSpeed, float]:
    """The link, and the unit in its seconds. ``latency`` is in units."""
    attention = layer(case, num_ranks)
    unit = attention.seconds(case.head_dim, 1.0)
    gathered = (num_ranks - 1) * attention.kv.shard_length * attention.kv.key_wire_bytes
    return GroupSpeed(latency=latency * unit, bandwidth=gathered / (rho * unit)), unit


def run(
    schedule: Schedule, case: Case, num_ranks: int, rho: float, *, rank: int = 0, latency: float = 0.0
) -> tuple[Timeline, Timeline]:
    """Forward and backward, in units."""
    speed, unit = speed_of(case, num_ranks, rho, latency)
    clock = Clock(speed)
    attention = KVGatherAttention(Mirror(num_ranks, rank, clock), schedule, kernel=TimedKernel(clock))
    local = make_tensors(case).to(torch.float32).shard(case.shards(num_ranks), rank)
    inputs = [x.requires_grad_() for x in (local.query, local.key, local.value)]
    output = attention(*inputs, case.sight(num_ranks, rank))
    forward = clock.read()
    output.backward(local.grad_output)
    total = clock.read()
    backward = Timeline(*(getattr(total, x) - getattr(forward, x) for x in ("total", "busy", "exposed")))
    return _in_units(forward, unit), _in_units(backward, unit)


def _in_units(timeline: Timeline, unit: float) -> Timeline:
    return Timeline(timeline.total / unit, timeline.busy / unit, timeline.exposed / unit)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("whole", (3.0, 2.0, 1.0), (5.0, 2.0, 0.0)),
        ("blocks", (2 + 3 / 16, 2.0, 3 / 16), (5.0, 4.0, 0.0)),
        ("blocks, all kept", (2 + 3 / 16, 2.0, 3 / 16), (5.0, 2.0, 0.0)),
        ("ring", (2.5, 2.0, 0.5), (5 + 1 / 6, 4.0, 1 / 6)),
    ],
)
def test_exposed_of_each_variant_on_four_ranks_when_a_gather_takes_as_long_as_the_scores(
    name: str, forward: tuple[float, ...], backward: tuple[float, ...]
) -> None:
    """total, busy, exposed. "whole" hides half of its forward, as the article's does; keeping spares a gather."""
    found = run(SCHEDULES[name], BIDIRECTIONAL, 4, rho=1.0)
    for timeline, right in zip(found, (forward, backward), strict=True):
        assert (timeline.total, timeline.busy, timeline.exposed) == pytest.approx(right)


def test_the_default_hides_nine_tenths_of_forward_and_all_of_backward() -> None:
    forward, backward = run(Schedule("blocks"), BIDIRECTIONAL, 4, rho=1.0)
    assert forward.hidden >= 0.90
    assert backward.hidden == pytest.approx(1.0)


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize(("rho", "latency"), [(0.25, 0.0), (0.5, 0.0), (1.0, 0.0), (2.0, 0.0), (0.5, 0.07)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_forecast_is_the_schedule(name: str, rho: float, latency: float, num_ranks: int) -> None:
    """What choose.py computes by hand is what the code does, to rounding."""
    speed, unit = speed_of(BIDIRECTIONAL, num_ranks, rho, latency)
    predicted = forecast(SCHEDULES[name], layer(BIDIRECTIONAL, num_ranks), speed, 1.0)
    for found, timeline in zip(
        run(SCHEDULES[name], BIDIRECTIONAL, num_ranks, rho, latency=latency), predicted, strict=True
    ):
        expected = _in_units(timeline, unit)
        assert (found.total, found.busy, found.exposed) == pytest.approx(
            (expected.total, expected.busy, expected.exposed), abs=1e-9
        )


HIDDEN = {  # of forward and backward, by ranks and rho; the table of docs/attention.md
    (4, 0.5): {"whole": (0.50, 1.00), "blocks": (1.00, 1.00), "ring": (1.00, 1.00)},
    (4, 1.0): {"whole": (0.50, 1.00), "blocks": (0.91, 1.00), "ring": (0.75, 0.96)},
    (4, 2.0): {"whole": (0.25, 0.98), "blocks": (0.45, 0.62), "ring": (0.38, 0.62)},
    (8, 0.5): {"whole": (0.50, 1.00), "blocks": (1.00, 1.00), "ring": (1.00, 1.00)},
    (8, 1.0): {"whole": (0.50, 1.00), "blocks": (0.89, 1.00), "ring": (0.88, 1.00)},
    (8, 2.0): {"whole": (0.25, 0.95), "blocks": (0.45, 0.62), "ring": (0.44, 0.61)},
}


@pytest.mark.parametrize(("num_ranks", "rho"), HIDDEN)
def test_what_hides(num_ranks: int, rho: float) -> None:
    for name, expected in HIDDEN[num_ranks, rho].items():
        hidden = [timeline.hidden for timeline in run(SCHEDULES[name], BIDIRECTIONAL, num_ranks, rho)]
        assert hidden == pytest.approx(expected, abs=0.0051)
    shown = " | ".join(f"{forward:.2f} / {backward:.2f}" for forward, backward in HIDDEN[num_ranks, rho].values())
    assert f"| {num_ranks} | {rho:g} | {shown} |" in Path("docs/attention.md").read_text()


@pytest.mark.parametrize("rho", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", ["blocks", "ring"])
def test_causal_ranks_take_equally_long_and_hide_as_much(name: str, rho: float) -> None:
    """An early and a late chunk on each rank: every rank has the same clock, and hides what it would without a mask."""
    timelines = [run(SCHEDULES[name], CAUSAL, 4, rho, rank=rank) for rank in range(4)]
    for rank in timelines:
        for found, first in zip(rank, timelines[0], strict=True):
            assert found.total == pytest.approx(first.total, abs=1e-9)
    hidden = [timeline.hidden for timeline in timelines[0]]
    assert hidden == pytest.approx(HIDDEN[4, rho][name], abs=0.011)


def test_half_is_kept_where_half_fits() -> None:
    kept = SCHEDULES["blocks, half kept"].num_kept(gathered_bytes(layer(BIDIRECTIONAL, 4).kv))
    assert kept == 4
    _, backward = run(SCHEDULES["blocks, half kept"], BIDIRECTIONAL, 4, rho=1.0)
    assert backward.busy == pytest.approx(3.0)
