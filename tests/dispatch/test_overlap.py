"""How much of the exchange hides under compute, on a virtual clock: links and experts take stated times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hybrid.dispatch.collectives import RankGroup, Transfer
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.overlap import run_in_chunks
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.dispatch.two_stage import TwoStageDispatcher
from ds_hybrid.placement import ExpertPlacement

NUM_TOKENS, HIDDEN = 64, 4
SECONDS_PER_ROW = 1.0


class Clock:
    """Of one rank: the time on its stream, when its link is free, and how long the stream has waited for the link."""

    def __init__(self) -> None:
        self.now = self.link_free = self.waited = 0.0

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def send(self, seconds: float) -> float:
        """Put a message on the link; returns when it has arrived."""
        self.link_free = max(self.now, self.link_free) + seconds
        return self.link_free

    def wait_until(self, time: float) -> None:
        self.waited += max(0.0, time - self.now)
        self.now = max(self.now, time)


class _Arrival:
    def __init__(self, clock: Clock, time: float) -> None:
        self._clock = clock
        self._time = time

    def wait(self) -> None:
        self._clock.wait_until(self._time)


class MirrorGroup(RankGroup):
    """Two ranks that hold the same tokens: what the other sends here is what this one sends to itself."""

    def __init__(self, clock: Clock) -> None:
        self.size, self.rank, self.meter, self._clock = 2, 0, Meter(), clock

    def all_gather_metadata(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor])

    def all_to_all(self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Transfer:
        time = self._clock.send(send_counts[1] * SECONDS_PER_ROW)
        num_received = sum(receive_counts)
        received = torch.cat([rows, rows])[:num_received]
        return Transfer(_Arrival(self._clock, time), lambda: received)


class _TimedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, clock: Clock, seconds_per_row: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, len(rows) * seconds_per_row
        clock.compute(ctx.seconds)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.compute(ctx.seconds)
        return gradient, None, None


def exposed(num_chunks: int, seconds_per_row: float) -> tuple[float, float]:
    """Seconds that the stream waits for the link in forward, and in backward."""
    clock = Clock()
    dispatcher = TwoStageDispatcher(MirrorGroup(clock))
    tokens = torch.randn(NUM_TOKENS, HIDDEN, requires_grad=True)
    # Each token has one expert on either rank: every row goes to both, and each chunk is as heavy as the next.
    ids = torch.tensor([[0, 2]]).repeat(NUM_TOKENS, 1)
    weights = torch.full((NUM_TOKENS, 2), 0.5, requires_grad=True)
    output = run_in_chunks(
        dispatcher,
        tokens,
        Routing(ids, weights, 4),
        ExpertPlacement.contiguous(4, 2),
        lambda rows, _: _TimedExperts.apply(rows, clock, seconds_per_row),
        num_chunks=num_chunks,
    )
    forward = clock.waited
    output.backward(torch.ones_like(output))
    return forward, clock.waited - forward


def test_without_chunks_everything_is_exposed() -> None:
    both_ways = 2 * NUM_TOKENS * SECONDS_PER_ROW
    assert exposed(1, seconds_per_row=2.0) == (both_ways, both_ways)


@pytest.mark.parametrize("num_chunks", [2, 4, 8])
def test_a_fraction_of_one_nth_is_exposed_when_compute_dominates(num_chunks: int) -> None:
    both_ways = 2 * NUM_TOKENS * SECONDS_PER_ROW
    forward, backward = exposed(num_chunks, seconds_per_row=2.0)
    assert forward == pytest.approx(both_ways / num_chunks)
    assert backward == pytest.approx(both_ways / num_chunks)


def test_a_link_slower_than_the_experts_hides_at_most_their_time() -> None:
    """Both directions share one link here, so all that can hide is what the experts compute."""
    both_ways = 2 * NUM_TOKENS * SECONDS_PER_ROW
    compute = 2 * NUM_TOKENS * 0.25
    forward, _ = exposed(4, seconds_per_row=0.25)
    assert both_ways - compute <= forward < both_ways
