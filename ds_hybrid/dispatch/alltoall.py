"""One row per (token, expert) to the expert's rank and back; weights stay at home. What DeepSpeed's AutoEP does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.dispatch.arrived import Arrived
from ds_hybrid.dispatch.dispatcher import Dispatcher, Plan
from ds_hybrid.dispatch.exchanges import RowsExchange, under_way
from ds_hybrid.dispatch.routing import Routing, count_values
from ds_hybrid.dispatch.rows import RowMap, expand, group_by_slot, weighted_sum
from ds_hybrid.dispatch.steps import Steps
from ds_hybrid.dispatch.wire import EncodedRowsExchange
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class AllToAllPlan(Plan):
    """How pairs become rows, and the split sizes."""

    sent: RowMap
    send_counts: list[int]
    receive_counts: list[int]


class AllToAllDispatcher(Dispatcher[AllToAllPlan]):
    """The baseline. Sums over k in logical order: the result does not depend on the placement, bit for bit."""

    mode = "alltoall"

    def plan(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> AllToAllPlan:
        facts, num_ranks, num_slots = self.facts(tokens, routing, placement), self.group.size, placement.num_slots
        # A rank with a fault takes part in the message that tells of it.
        ids = routing.topk_ids if facts.fault is None else routing.topk_ids[:0]
        rank, slot = self.locate(ids, placement)
        place = (rank * num_slots + slot).reshape(-1)

        counts = count_values(place, num_ranks * num_slots).view(num_ranks, num_slots)
        own_facts = counts.new_tensor(facts.values).expand(num_ranks, -1)
        received = self.group.all_to_all_metadata(torch.cat([counts, own_facts], 1))
        received_counts, received_facts = received.split([num_slots, len(facts.values)], 1)
        # The one wait for the device: split sizes, and the facts of every rank.
        split_sizes = torch.stack([counts.sum(1), received_counts.sum(1)], 1)
        host = torch.cat([split_sizes, received_facts], 1).tolist()
        self.check([theirs for _, _, *theirs in host], facts)
        send_counts, receive_counts = [row[0] for row in host], [row[1] for row in host]

        sent = RowMap.of(torch.argsort(place, stable=True), routing.num_tokens, routing.top_k)
        slots = torch.arange(num_slots, device=place.device).repeat(num_ranks)
        slot_of_row = slots.repeat_interleave(received_counts.reshape(-1), output_size=sum(receive_counts))
        pairs, num_rows_per_slot = group_by_slot(slot_of_row[:, None], num_slots, sum(receive_counts))
        num_rows_needed = self.count(rank)
        return AllToAllPlan(routing, num_rows_needed, pairs, num_rows_per_slot, sent, send_counts, receive_counts)

    def dispatch(self, tokens: Tensor, plan: AllToAllPlan) -> Steps[Arrived]:
        rows = expand(self.crossing(tokens, plan), plan.sent)
        exchange = EncodedRowsExchange(self.group, plan.send_counts, plan.receive_counts, self.wire_dtype)
        flight = exchange.depart(rows)
        yield from under_way(flight)
        (rows,) = flight.arrive()
        return plan.arrived(rows, None)

    def combine(self, partial_sums: Tensor, plan: AllToAllPlan) -> Steps[Tensor]:
        rows = self.crossing(partial_sums, plan)
        flight = RowsExchange(self.group, plan.receive_counts, plan.send_counts).depart(rows)
        yield from under_way(flight)
        (rows,) = flight.arrive()
        return weighted_sum(rows, plan.sent, plan.routing.topk_weights)
