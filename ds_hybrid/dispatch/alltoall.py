"""One row per (token, expert) to the expert's rank and back; weights stay at home. What DeepSpeed's AutoEP does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.dispatch.collectives import all_to_all_rows
from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.routing import Routing, count_values
from ds_hybrid.dispatch.rows import RowMap, expand, group_by_slot, weighted_sum
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class AllToAllState:
    """How the rows of one call were sent, received and sorted."""

    sent: RowMap
    received: RowMap
    send_counts: list[int]
    receive_counts: list[int]
    topk_weights: Tensor
    num_rows_needed: Tensor


class AllToAllDispatcher(Dispatcher):
    """The baseline. Sums over k in logical order: the result does not depend on the placement, bit for bit."""

    mode = "alltoall"

    def dispatch(
        self, tokens: Tensor, routing: Routing, placement: ExpertPlacement
    ) -> tuple[Tensor, Tensor, AllToAllState]:
        num_slots = placement.num_slots
        rank, slot = self.locate(routing.topk_ids, placement)
        _, num_rows_needed = self.rows_needed(rank)
        place = (rank * num_slots + slot).reshape(-1)
        sent = RowMap.of(torch.argsort(place, stable=True), routing.num_tokens, routing.top_k)

        counts = count_values(place, self.group.size * num_slots).view(self.group.size, num_slots)
        facts = counts.new_tensor(self.facts(tokens, routing, placement)).expand(self.group.size, -1)
        received = self.group.all_to_all_metadata(torch.cat([counts, facts], 1))
        received_counts = received[:, :num_slots]
        # The one wait for the device: split sizes, and the facts of every rank.
        send_counts, receive_counts = torch.stack([counts.sum(1), received_counts.sum(1)]).tolist()
        self.check(received[:, num_slots:].tolist())

        self.group.meter.add_tokens(routing.num_tokens)
        rows = expand(self.crossing(tokens, num_rows_needed), sent)
        rows = all_to_all_rows(rows, self.group, send_counts, receive_counts)

        slots = torch.arange(num_slots, device=rows.device).repeat(self.group.size)
        slot_of_row = slots.repeat_interleave(received_counts.reshape(-1), output_size=len(rows))
        arrived, num_rows_per_slot = group_by_slot(slot_of_row[:, None], num_slots, len(rows))
        state = AllToAllState(sent, arrived, send_counts, receive_counts, routing.topk_weights, num_rows_needed)
        return expand(rows, arrived), num_rows_per_slot, state

    def combine(self, expert_rows: Tensor, state: AllToAllState) -> Tensor:
        rows = self.crossing(weighted_sum(expert_rows, state.received), state.num_rows_needed)
        rows = all_to_all_rows(rows, self.group, state.receive_counts, state.send_counts)
        return weighted_sum(rows, state.sent, state.topk_weights)
