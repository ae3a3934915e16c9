"""How much of the exchange hides under compute, on a virtual clock: links and experts take stated times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hybrid.dispatch.alltoall import AllToAllDispatcher
from ds_hybrid.dispatch.arrived import Arrived, by_rows
from ds_hybrid.dispatch.collectives import RankGroup, Transfer
from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.hierarchical import HierarchicalDispatcher, NodeGroups
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.overlap import run_in_chunks
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.dispatch.two_stage import TwoStageDispatcher
from ds_hybrid.placement import ExpertPlacement

NUM_TOKENS, HIDDEN = 64, 4
SECONDS_PER_ROW = 1.0


class Clock:
    """Of one rank: the time on its stream, and how long the stream has waited for links."""

    def __init__(self) -> None:
        self.now = self.waited = 0.0

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def wait_until(self, time: float) -> None:
        self.waited += max(0.0, time - self.now)
        self.now = max(self.now, time)


class Link:
    """Carries one message after the other."""

    def __init__(self, clock: Clock, *, seconds_per_message: float = 0.0) -> None:
        self.clock, self.free, self.seconds_per_message = clock, 0.0, seconds_per_message

    def send(self, num_rows: int) -> _Arrival:
        seconds = self.seconds_per_message + num_rows * SECONDS_PER_ROW
        self.free = max(self.clock.now, self.free) + seconds
        return _Arrival(self.clock, self.free)


class _Arrival:
    def __init__(self, clock: Clock, time: float) -> None:
        self._clock = clock
        self._time = time

    def wait(self) -> None:
        self._clock.wait_until(self._time)


class MirrorGroup(RankGroup):
    """Ranks that hold the same tokens: what the others send here is what this one sends to itself."""

    def __init__(self, link: Link, size: int = 2) -> None:
        self.size, self.rank, self.meter, self._link = size, 0, Meter(), link
        self.num_sent = self.num_waited = 0

    def all_gather_metadata(self, tensor: Tensor) -> Tensor:
        self._link.send(0).wait()
        return torch.stack([tensor] * self.size)

    def all_to_all_metadata(self, tensor: Tensor) -> Tensor:
        self._link.send(0).wait()
        return tensor[:1].expand(self.size, -1)

    def all_to_all(self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Transfer:
        arrival = self._link.send(sum(send_counts) - send_counts[self.rank])
        received = torch.cat([rows] * self.size)[: sum(receive_counts)]
        self.num_sent += 1

        def arrive() -> Tensor:
            self.num_waited += 1
            return received

        return Transfer(arrival, arrive)


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


def exposed(
    dispatcher: Dispatcher[Any], clock: Clock, num_chunks: int, *, seconds_per_row: float = 2.0
) -> tuple[float, float]:
    """Seconds that the stream waits for links in forward, and in backward. Each token has one expert on each rank, so
    every row goes to all, and each chunk is as heavy as the next.
    """
    num_ranks = dispatcher.group.size
    tokens = torch.randn(NUM_TOKENS, HIDDEN, requires_grad=True)
    ids = torch.arange(num_ranks).repeat(NUM_TOKENS, 1)
    weights = torch.full(ids.shape, 1 / num_ranks, requires_grad=True)
    output = run_in_chunks(
        dispatcher,
        tokens,
        Routing(ids, weights, num_ranks),
        ExpertPlacement.contiguous(num_ranks, num_ranks),
        by_rows(lambda rows, _: _TimedExperts.apply(rows, clock, seconds_per_row)),
        num_chunks=num_chunks,
    )
    forward = clock.waited
    output.backward(torch.ones_like(output))
    return forward, clock.waited - forward


BOTH_WAYS = 2 * NUM_TOKENS * SECONDS_PER_ROW
DISPATCHERS: list[type[Dispatcher[Any]]] = [TwoStageDispatcher, AllToAllDispatcher]


def test_without_chunks_everything_is_exposed() -> None:
    clock = Clock()
    assert exposed(TwoStageDispatcher(MirrorGroup(Link(clock))), clock, 1) == (BOTH_WAYS, BOTH_WAYS)


@pytest.mark.parametrize("num_chunks", [2, 4, 8])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_a_fraction_of_one_nth_is_exposed_when_compute_dominates(
    dispatcher: type[Dispatcher[Any]], num_chunks: int
) -> None:
    clock = Clock()
    forward, backward = exposed(dispatcher(MirrorGroup(Link(clock))), clock, num_chunks)
    assert forward == pytest.approx(BOTH_WAYS / num_chunks)
    assert backward == pytest.approx(BOTH_WAYS / num_chunks)


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_counts_and_ids_never_wait_behind_rows(num_chunks: int) -> None:
    """Each message costs its own time and no more, two for the plan of a chunk; backward needs no plan."""
    clock, seconds = Clock(), 3.0
    link = Link(clock, seconds_per_message=seconds)
    forward, backward = exposed(TwoStageDispatcher(MirrorGroup(link)), clock, num_chunks)
    rows_first_and_last = BOTH_WAYS / num_chunks + 2 * seconds
    assert forward == pytest.approx(2 * num_chunks * seconds + rows_first_and_last)
    assert backward == pytest.approx(rows_first_and_last)


@pytest.mark.parametrize("num_chunks", [1, 2, 4, 8])
def test_both_hops_over_nodes_hide(num_chunks: int) -> None:
    """A row crosses once to the other node, and from each of its two arrivals once to the neighbour inside."""
    clock = Clock()
    across, inside = MirrorGroup(Link(clock)), MirrorGroup(Link(clock))
    group = MirrorGroup(Link(clock), size=4)
    dispatcher = HierarchicalDispatcher(group, NodeGroups((0, 0, 1, 1), across, inside))
    serial = 2 * (NUM_TOKENS + 2 * NUM_TOKENS) * SECONDS_PER_ROW
    forward, backward = exposed(dispatcher, clock, num_chunks)
    assert forward == pytest.approx(serial / num_chunks)
    assert backward == pytest.approx(serial / num_chunks)


class _EnoughError(Exception):
    """As torch raises where a recomputation has all it wanted."""


def test_a_forward_that_is_cut_short_waits_for_what_it_sent() -> None:
    """So that no message ends in memory that has been given away."""
    clock = Clock()
    group = MirrorGroup(Link(clock))
    num_calls = 0

    def enough(arrived: Arrived) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise _EnoughError
        return arrived.add(arrived.rows())

    tokens, ids = torch.randn(NUM_TOKENS, HIDDEN), torch.arange(2).repeat(NUM_TOKENS, 1)
    routing = Routing(ids, torch.full(ids.shape, 0.5), 2)
    with pytest.raises(_EnoughError):
        run_in_chunks(
            TwoStageDispatcher(group), tokens, routing, ExpertPlacement.contiguous(2, 2), enough, num_chunks=4
        )
    assert group.num_sent == 4  # three chunks had left, one was on its way home
    assert group.num_waited == group.num_sent


def test_a_link_slower_than_the_experts_hides_at_most_their_time() -> None:
    """Both directions share one link here, so all that can hide is what the experts compute."""
    clock = Clock()
    compute = 2 * NUM_TOKENS * 0.25
    forward, _ = exposed(TwoStageDispatcher(MirrorGroup(Link(clock))), clock, 4, seconds_per_row=0.25)
    assert BOTH_WAYS - compute <= forward < BOTH_WAYS
