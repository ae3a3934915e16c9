"""First the routing to everyone, then each token once to each rank that needs it; one partial sum comes back.

Rows on the wire equal the lower bound for any routing. Weights ride along as extra columns, so only the ranks that need
a token receive them and their gradients come back with the token's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.dispatch.collectives import all_to_all_rows
from ds_hybrid.dispatch.gathering import GatheringDispatcher
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.dispatch.rows import RowMap, expand, group_by_slot, weighted_sum
from ds_hybrid.dispatch.wire import exchange_weighted_rows
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class TwoStageState:
    """Which tokens went where, and which received rows which local expert worked on, with weights [received, K]."""

    sent: RowMap
    pairs: RowMap
    received_weights: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    num_rows_needed: Tensor


class TwoStageDispatcher(GatheringDispatcher):
    """AllGather-EP in two stages. Both sides derive the split sizes from the gathered ids: no counts are exchanged."""

    mode = "two_stage"

    def dispatch(
        self, tokens: Tensor, routing: Routing, placement: ExpertPlacement
    ) -> tuple[Tensor, Tensor, TwoStageState]:
        gathered = self.gather_routing(tokens, routing, placement)
        own_ranks = gathered.rank_of_choice[self.group.rank, : routing.num_tokens]
        needed, num_rows_needed = self.rows_needed(own_ranks)
        slots = gathered.local_slots(self.group.rank)
        is_received = (slots >= 0).any(1)
        is_received_from = is_received.view(self.group.size, gathered.num_padded_tokens)
        # The one wait for the device after the ids: rows to each rank, rows from each rank, (row, expert) pairs here.
        counts = torch.cat([needed.sum(0), is_received_from.sum(1), (slots >= 0).sum()[None]]).tolist()
        send_counts, receive_counts, num_pairs = counts[: self.group.size], counts[self.group.size : -1], counts[-1]

        sent = _map_of_sent(needed, sum(send_counts), routing.top_k)
        received = is_received.nonzero_static(size=sum(receive_counts))[:, 0]
        pairs, num_rows_per_slot = group_by_slot(slots[received], placement.num_slots, num_pairs)

        self.group.meter.add_tokens(routing.num_tokens)
        rows = expand(self.crossing(tokens, num_rows_needed), sent)
        weights = expand(routing.topk_weights.to(torch.promote_types(tokens.dtype, torch.float32)), sent)
        rows, weights = exchange_weighted_rows(rows, weights, self.group, send_counts, receive_counts)
        state = TwoStageState(sent, pairs, weights, send_counts, receive_counts, num_rows_needed)
        return expand(rows, pairs), num_rows_per_slot, state

    def combine(self, expert_rows: Tensor, state: TwoStageState) -> Tensor:
        partial_sums = weighted_sum(expert_rows, state.pairs, state.received_weights)
        rows = self.crossing(partial_sums, state.num_rows_needed)
        rows = all_to_all_rows(rows, self.group, state.receive_counts, state.send_counts)
        return weighted_sum(rows, state.sent)


def _map_of_sent(needed: Tensor, num_rows: int, top_k: int) -> RowMap:
    """Rows by (rank, token) for a [T, P] table of needs; copy m of a token is its m-th needed rank."""
    num_tokens, num_ranks = needed.shape
    num_copies = min(top_k, num_ranks)
    rank, token = needed.t().nonzero_static(size=num_rows).unbind(1)
    copy = needed.cumsum(1)[token, rank] - 1
    return RowMap.of(token * num_copies + copy, num_tokens, num_copies)
