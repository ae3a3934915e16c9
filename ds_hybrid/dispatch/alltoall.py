"""One row per (token, expert) to the expert's rank and back; weights stay at home. What DeepSpeed's AutoEP does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.exchanges import Flight, RowsExchange
from ds_hybrid.dispatch.routing import Routing, count_values
from ds_hybrid.dispatch.rows import RowMap, expand, group_by_slot, weighted_sum
from ds_hybrid.dispatch.wire import WeightedRowsExchange
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class AllToAllStarted:
    """Rows on their way to the experts; ``counts`` [P, E/P] is how many come from each rank for each local slot."""

    flight: Flight
    counts: Tensor
    sent: RowMap
    send_counts: list[int]
    receive_counts: list[int]
    topk_weights: Tensor
    num_rows_needed: Tensor


@dataclass(frozen=True)
class AllToAllState:
    """How the rows of one call were sent, and how they were sorted when they arrived."""

    started: AllToAllStarted
    arrived: RowMap


class AllToAllDispatcher(Dispatcher):
    """The baseline. Sums over k in logical order: the result does not depend on the placement, bit for bit."""

    mode = "alltoall"

    def start_dispatch(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> AllToAllStarted:
        self.group.meter.add_tokens(routing.num_tokens)
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

        num_rows_needed = self.num_rows_needed(rank)
        rows = expand(self.crossing(tokens, num_rows_needed), sent)
        no_weights = routing.topk_weights.new_empty((len(rows), 0))
        exchange = WeightedRowsExchange(self.group, send_counts, receive_counts, self.wire_dtype)
        return AllToAllStarted(
            exchange.depart(rows, no_weights),
            received_counts,
            sent,
            send_counts,
            receive_counts,
            routing.topk_weights,
            num_rows_needed,
        )

    def finish_dispatch(self, started: AllToAllStarted) -> tuple[Tensor, Tensor, AllToAllState]:
        rows, _ = started.flight.arrive()
        num_slots = started.counts.shape[1]
        slots = torch.arange(num_slots, device=rows.device).repeat(self.group.size)
        slot_of_row = slots.repeat_interleave(started.counts.reshape(-1), output_size=len(rows))
        arrived, num_rows_per_slot = group_by_slot(slot_of_row[:, None], num_slots, len(rows))
        return expand(rows, arrived), num_rows_per_slot, AllToAllState(started, arrived)

    def start_combine(self, expert_rows: Tensor, state: AllToAllState) -> Flight:
        started = state.started
        rows = self.crossing(weighted_sum(expert_rows, state.arrived), started.num_rows_needed)
        return RowsExchange(self.group, started.receive_counts, started.send_counts).depart(rows)

    def finish_combine(self, flight: Flight, state: AllToAllState) -> Tensor:
        (rows,) = flight.arrive()
        return weighted_sum(rows, state.started.sent, state.started.topk_weights)
