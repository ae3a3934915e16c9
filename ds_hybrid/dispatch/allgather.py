"""Every token to every rank; each rank returns one weighted partial sum per token.

Its volume never grows with top-k or skew, so it wins where the group is smaller than top-k. Source of the scheme: the
AllGather dispatcher of Megatron-Core; the routing is gathered as K ids per token, never as a dense [T, E] table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.dispatch.arrived import Arrived
from ds_hybrid.dispatch.dispatcher import Dispatcher, Plan
from ds_hybrid.dispatch.exchanges import ReduceScatterExchange, under_way
from ds_hybrid.dispatch.gathering import gather_ids
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.dispatch.steps import Steps
from ds_hybrid.dispatch.wire import GatherExchange
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class AllGatherPlan(Plan):
    """The tokens of the longest rank, to which the others are padded."""

    longest: int


class AllGatherDispatcher(Dispatcher[AllGatherPlan]):
    """Gathers tokens and weights, padded to the longest rank; reduce-scatters the partial sums."""

    mode = "allgather"

    def plan(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> AllGatherPlan:
        counts = self.gather_counts(self.group, routing.num_tokens, self.facts(tokens, routing, placement))
        all_ids = gather_ids(self.group, routing.topk_ids, counts, routing.num_experts)
        num_rows_needed = self.count(self.locate(routing.topk_ids, placement)[0])
        pairs, num_rows_per_slot = self.pairs_here(all_ids.flatten(0, 1), placement)
        return AllGatherPlan(routing, num_rows_needed, pairs, num_rows_per_slot, max(counts))

    def dispatch(self, tokens: Tensor, plan: AllGatherPlan) -> Steps[Arrived]:
        padded_tokens = _pad(self.crossing(tokens, plan), plan.longest)
        tokens_flight = GatherExchange(self.group, self.wire_dtype).depart(padded_tokens)
        weights_flight = GatherExchange(self.group).depart(_pad(plan.routing.topk_weights, plan.longest))
        yield from under_way(tokens_flight, weights_flight)
        (tokens,), (weights,) = tokens_flight.arrive(), weights_flight.arrive()
        return plan.arrived(tokens, weights)

    def combine(self, partial_sums: Tensor, plan: AllGatherPlan) -> Steps[Tensor]:
        flight = ReduceScatterExchange(self.group).depart(self.crossing(partial_sums, plan))
        yield from under_way(flight)
        (total,) = flight.arrive()
        return total[: plan.routing.num_tokens]


def _pad(rows: Tensor, num_rows: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, num_rows - len(rows)))
