"""One row per (token, expert) to the expert's rank and back; weights stay at home. What DeepSpeed's AutoEP does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.dispatch.arrived import Arrived
from ds_hybrid.dispatch.dispatcher import Dispatcher, Plan
from ds_hybrid.dispatch.exchanges import RowsExchange
from ds_hybrid.dispatch.routing import Routing, count_values
from ds_hybrid.dispatch.rows import RowMap, expand, group_by_slot, weighted_sum
from ds_hybrid.dispatch.steps import Steps
from ds_hybrid.dispatch.wire import WeightedRowsExchange
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class AllToAllPlan(Plan):
    """How pairs become rows, and the split sizes; ``counts`` [P, E/P] come from each rank for each local slot."""

    sent: RowMap
    counts: Tensor
    send_counts: list[int]
    receive_counts: list[int]


class AllToAllDispatcher(Dispatcher[AllToAllPlan]):
    """The baseline. Sums over k in logical order: the result does not depend on the placement, bit for bit."""

    mode = "alltoall"

    def plan(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> AllToAllPlan:
        num_slots = placement.num_slots
        rank, slot = self.locate(routing.topk_ids, placement)
        place = (rank * num_slots + slot).reshape(-1)
        sent = RowMap.of(torch.argsort(place, stable=True), routing.num_tokens, routing.top_k)

        counts = count_values(place, self.group.size * num_slots).view(self.group.size, num_slots)
        facts = counts.new_tensor(self.facts(tokens, routing, placement)).expand(self.group.size, -1)
        received = self.group.all_to_all_metadata(torch.cat([counts, facts], 1))
        received_counts = received[:, :num_slots]
        # The one wait for the device: split sizes, and the facts of every rank.
        send_counts, receive_counts = torch.stack([counts.sum(1), received_counts.sum(1)]).tolist()
        self.check(received[:, num_slots:].tolist())
        return AllToAllPlan(routing, self.count(rank), sent, received_counts, send_counts, receive_counts)

    def dispatch(self, tokens: Tensor, plan: AllToAllPlan) -> Steps[Arrived]:
        rows = expand(self.crossing(tokens, plan), plan.sent)
        exchange = WeightedRowsExchange(self.group, plan.send_counts, plan.receive_counts, self.wire_dtype)
        flight = exchange.depart(rows, plan.routing.topk_weights.new_empty((len(rows), 0)))
        yield
        rows, _ = flight.arrive()
        num_slots = plan.counts.shape[1]
        slots = torch.arange(num_slots, device=rows.device).repeat(self.group.size)
        slot_of_row = slots.repeat_interleave(plan.counts.reshape(-1), output_size=len(rows))
        pairs, num_rows_per_slot = group_by_slot(slot_of_row[:, None], num_slots, len(rows))
        return Arrived(rows, pairs, num_rows_per_slot, None)

    def combine(self, partial_sums: Tensor, plan: AllToAllPlan) -> Steps[Tensor]:
        rows = self.crossing(partial_sums, plan)
        flight = RowsExchange(self.group, plan.receive_counts, plan.send_counts).depart(rows)
        yield
        (rows,) = flight.arrive()
        return weighted_sum(rows, plan.sent, plan.routing.topk_weights)
