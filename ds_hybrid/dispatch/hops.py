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

from ds_hybrid.dispatch.arrived import Arrived
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.dispatcher import Dispatcher, Plan
from ds_hybrid.dispatch.exchanges import Flight, RowsExchange, under_way
from ds_hybrid.dispatch.gathering import gather_ids
from ds_hybrid.dispatch.routing import Routing, ranks_needed
from ds_hybrid.dispatch.rows import RowMap, expand, weighted_sum
from ds_hybrid.dispatch.steps import Steps
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
    def member_for_rank(self) -> tuple[int, ...]:
        """``next_rank`` as members of ``group``, 0 to Q-1; one more entry, for rank -1, is -1."""
        return (*(self.ranks.index(rank) if rank >= 0 else -1 for rank in self.next_rank), -1)


@dataclass(frozen=True)
class Leg:
    """How the rows of one call went over one hop."""

    hop: Hop
    sent: RowMap
    send_counts: list[int]
    receive_counts: list[int]


@dataclass(frozen=True)
class HopsPlan(Plan):
    """The legs of one call."""

    legs: tuple[Leg, ...]


class HopsDispatcher(Dispatcher[HopsPlan]):
    """Sends rows over ``hops`` one after the other; the last hop leads to the rank of the expert."""

    def __init__(self, group: RankGroup, hops: Sequence[Hop], **options: Any) -> None:
        super().__init__(group, **options)
        self.hops = tuple(hops)

    def plan(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> HopsPlan:
        # Over the whole group, so that all ranks see the facts of all.
        counts = self.gather_counts(self.group, routing.num_tokens, self.facts(tokens, routing, placement))
        num_rows = [counts[rank] for rank in self.hops[0].ranks]
        leg, ids, num_pairs = self._plan_leg(self.hops[0], routing.topk_ids, num_rows, placement)
        legs = [leg]
        for hop in self.hops[1:]:
            num_rows = self.gather_counts(hop.group, len(ids))
            leg, ids, num_pairs = self._plan_leg(hop, ids, num_rows, placement)
            legs.append(leg)
        num_rows_needed = self.count(self.locate(routing.topk_ids, placement)[0])
        return HopsPlan(routing, num_rows_needed, *self.pairs_here(ids, placement, num_pairs), tuple(legs))

    def dispatch(self, tokens: Tensor, plan: HopsPlan) -> Steps[Arrived]:
        rows, weights = self.crossing(tokens, plan), plan.routing.topk_weights
        for leg in plan.legs:
            flight = self._depart(leg, rows, weights)
            yield from under_way(flight)
            rows, weights = flight.arrive()
        return plan.arrived(rows, weights)

    def combine(self, partial_sums: Tensor, plan: HopsPlan) -> Steps[Tensor]:
        rows = self.crossing(partial_sums, plan)
        for leg in reversed(plan.legs):
            flight = RowsExchange(leg.hop.group, leg.receive_counts, leg.send_counts).depart(rows)
            yield from under_way(flight)
            (rows,) = flight.arrive()
            rows = weighted_sum(rows, leg.sent)
        return rows

    def _depart(self, leg: Leg, rows: Tensor, weights: Tensor) -> Flight:
        exchange = WeightedRowsExchange(leg.hop.group, leg.send_counts, leg.receive_counts, self.wire_dtype)
        return exchange.depart(expand(rows, leg.sent), expand(weights, leg.sent))

    def _plan_leg(
        self, hop: Hop, ids: Tensor, num_rows: list[int], placement: ExpertPlacement
    ) -> tuple[Leg, Tensor, int]:
        """The leg of rows with these ``ids`` [N, K]; the ids of the rows that arrive [R, K], and how many of their
        choices are experts of this rank. ``num_rows`` are the rows of each member of the hop's group.
        """
        group = hop.group
        all_ids = gather_ids(group, ids, num_rows, placement.num_experts)
        rank, _ = self.locate(all_ids, placement)
        member = self.constant(hop.member_for_rank, rank.device)[rank]
        needed = ranks_needed(member[group.rank, : len(ids)], group.size)
        arrives = (member == group.rank).any(2)
        # The one wait for the device besides that for the counts.
        counts = torch.cat([needed.sum(0), arrives.sum(1), (rank == self.group.rank).sum()[None]]).tolist()
        send_counts, receive_counts, num_pairs = counts[: group.size], counts[group.size : -1], counts[-1]
        arrived = arrives.flatten().nonzero_static(size=sum(receive_counts))[:, 0]
        leg = Leg(hop, _map_of_sent(needed, sum(send_counts), ids.shape[1]), send_counts, receive_counts)
        return leg, all_ids.flatten(0, 1)[arrived], num_pairs


def _map_of_sent(needed: Tensor, num_sent: int, top_k: int) -> RowMap:
    """Rows by (rank, row) for an [N, Q] table of needs; copy m of a row is for its m-th needed rank."""
    num_rows, num_ranks = needed.shape
    num_copies = min(top_k, num_ranks)
    rank, row = needed.t().nonzero_static(size=num_sent).unbind(1)
    copy = needed.cumsum(1)[row, rank] - 1
    return RowMap.of(row * num_copies + copy, num_rows, num_copies)
