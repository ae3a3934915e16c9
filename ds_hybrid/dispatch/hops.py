"""Dispatch in hops: over each, a row travels once to each rank that needs it, and one partial sum comes back.

One hop over the whole expert-parallel group is ``two_stage``; a hop across nodes and then one inside the node is
``hierarchical``. Before a hop its ranks gather the ids of each other's rows, so both sides know the split sizes and no
counts are exchanged. Weights ride with the rows, so only the ranks that need a row get them, and their gradients come
back with the row's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.exchanges import Flight, RowsExchange
from ds_hybrid.dispatch.gathering import gather_ids
from ds_hybrid.dispatch.routing import Routing, ranks_needed
from ds_hybrid.dispatch.rows import RowMap, expand, weighted_sum
from ds_hybrid.dispatch.wire import WeightedRowsExchange
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class Hop:
    """Where this rank hands rows on to.

    Attributes:
        group: the Q ranks that exchange rows, this one among them.
        next_rank: for each of the P expert-parallel ranks the one to which a row bound for it is handed, or -1 where
            this hop does not lead to it. Together they are the ranks of ``group``.
    """

    group: RankGroup
    next_rank: tuple[int, ...]

    @cached_property
    def ranks(self) -> list[int]:
        """The expert-parallel ranks of ``group``, in its order (a process group is sorted)."""
        return sorted(set(self.next_rank) - {-1})

    @cached_property
    def member_for_rank(self) -> list[int]:
        """``next_rank`` as members of ``group``, 0 to Q-1; one more entry, for rank -1, is -1."""
        return [*(self.ranks.index(rank) if rank >= 0 else -1 for rank in self.next_rank), -1]


@dataclass(frozen=True)
class Leg:
    """How the rows of one call went over one hop."""

    hop: Hop
    sent: RowMap
    send_counts: list[int]
    receive_counts: list[int]


@dataclass(frozen=True)
class HopsStarted:
    """Rows on their way over the first hop; ``ids`` [arriving, K], of which ``num_pairs`` are experts of this rank."""

    flight: Flight
    first_leg: Leg
    ids: Tensor
    num_pairs: int
    placement: ExpertPlacement
    num_rows_needed: Tensor


@dataclass(frozen=True)
class HopsState:
    """The legs of one call, and which arrived rows which local expert worked on, with their weights [arrived, K]."""

    legs: tuple[Leg, ...]
    pairs: RowMap
    arrived_weights: Tensor
    num_rows_needed: Tensor


class HopsDispatcher(Dispatcher):
    """Sends rows over ``hops`` one after the other; the last hop leads to the rank of the expert."""

    def __init__(self, group: RankGroup, hops: Sequence[Hop], **options: Any) -> None:
        super().__init__(group, **options)
        self.hops = tuple(hops)

    def start_dispatch(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> HopsStarted:
        self.group.meter.add_tokens(routing.num_tokens)
        # Over the whole group, so that all ranks see the facts of all.
        counts = self.gather_counts(self.group, routing.num_tokens, self.facts(tokens, routing, placement))
        num_rows_needed = self.num_rows_needed(self.locate(routing.topk_ids, placement)[0])
        hop = self.hops[0]
        num_rows = [counts[rank] for rank in hop.ranks]
        leg, ids, num_pairs = self._plan(hop, routing.topk_ids, num_rows, placement)
        flight = self._depart(leg, self.crossing(tokens, num_rows_needed), routing.topk_weights)
        return HopsStarted(flight, leg, ids, num_pairs, placement, num_rows_needed)

    def finish_dispatch(self, started: HopsStarted) -> tuple[Tensor, Tensor, HopsState]:
        legs, ids, num_pairs, placement = [started.first_leg], started.ids, started.num_pairs, started.placement
        rows, weights = started.flight.arrive()
        for hop in self.hops[1:]:
            num_rows = self.gather_counts(hop.group, len(ids))
            leg, ids, num_pairs = self._plan(hop, ids, num_rows, placement)
            rows, weights = self._depart(leg, rows, weights).arrive()
            legs.append(leg)
        pairs, num_rows_per_slot = self.pairs_here(ids, placement, num_pairs)
        state = HopsState(tuple(legs), pairs, weights, started.num_rows_needed)
        return expand(rows, pairs), num_rows_per_slot, state

    def start_combine(self, expert_rows: Tensor, state: HopsState) -> Flight:
        rows = weighted_sum(expert_rows, state.pairs, state.arrived_weights)
        rows = self.crossing(rows, state.num_rows_needed)
        for leg in reversed(state.legs[1:]):
            (rows,) = _way_back(leg).run(rows)
            rows = weighted_sum(rows, leg.sent)
        return _way_back(state.legs[0]).depart(rows)

    def finish_combine(self, flight: Flight, state: HopsState) -> Tensor:
        (rows,) = flight.arrive()
        return weighted_sum(rows, state.legs[0].sent)

    def _depart(self, leg: Leg, rows: Tensor, weights: Tensor) -> Flight:
        exchange = WeightedRowsExchange(leg.hop.group, leg.send_counts, leg.receive_counts, self.wire_dtype)
        return exchange.depart(expand(rows, leg.sent), expand(weights, leg.sent))

    def _plan(self, hop: Hop, ids: Tensor, num_rows: list[int], placement: ExpertPlacement) -> tuple[Leg, Tensor, int]:
        """The leg of rows with these ``ids`` [N, K]; the ids of the rows that arrive [R, K], and how many of their
        choices are experts of this rank. ``num_rows`` are the rows of each member of the hop's group.
        """
        group = hop.group
        all_ids = gather_ids(group, ids, num_rows, placement.num_experts)
        rank, _ = self.locate(all_ids, placement)
        member = rank.new_tensor(hop.member_for_rank)[rank]
        needed = ranks_needed(member[group.rank, : len(ids)], group.size)
        arrives = (member == group.rank).any(2)
        # The one wait for the device besides that for the counts.
        counts = torch.cat([needed.sum(0), arrives.sum(1), (rank == self.group.rank).sum()[None]]).tolist()
        send_counts, receive_counts, num_pairs = counts[: group.size], counts[group.size : -1], counts[-1]
        arrived = arrives.flatten().nonzero_static(size=sum(receive_counts))[:, 0]
        leg = Leg(hop, _map_of_sent(needed, sum(send_counts), ids.shape[1]), send_counts, receive_counts)
        return leg, all_ids.flatten(0, 1)[arrived], num_pairs


def _way_back(leg: Leg) -> RowsExchange:
    return RowsExchange(leg.hop.group, leg.receive_counts, leg.send_counts)


def _map_of_sent(needed: Tensor, num_sent: int, top_k: int) -> RowMap:
    """Rows by (rank, row) for an [N, Q] table of needs; copy m of a row is for its m-th needed rank."""
    num_rows, num_ranks = needed.shape
    num_copies = min(top_k, num_ranks)
    rank, row = needed.t().nonzero_static(size=num_sent).unbind(1)
    copy = needed.cumsum(1)[row, rank] - 1
    return RowMap.of(row * num_copies + copy, num_rows, num_copies)
