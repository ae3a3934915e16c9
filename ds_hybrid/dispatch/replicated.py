"""The expert-parallel group lies inside a tensor-parallel group: every rank has the same tokens already.

Nothing is dispatched. Each rank runs its experts on all tokens, and one all-reduce adds the weighted partial sums. In
backward the gradients of tokens and weights, which each rank knows only for its own experts, are all-reduced, so every
rank ends with the whole gradient, the router's included.
"""

from __future__ import annotations

from torch import Tensor

from ds_hybrid.dispatch.arrived import Arrived
from ds_hybrid.dispatch.dispatcher import Dispatcher, Plan
from ds_hybrid.dispatch.exchanges import AllReduceExchange, ShareExchange, under_way
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.dispatch.steps import Steps
from ds_hybrid.errors import DispatchError
from ds_hybrid.placement import ExpertPlacement


class ReplicatedDispatcher(Dispatcher[Plan]):
    """Takes the same tokens and routing on every rank; gives the same output on every rank.

    The loss after it is one loss that every rank computes, not a sum over ranks.
    """

    mode = "replicated"

    def plan(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> Plan:
        num_tokens = self.gather_counts(self.group, routing.num_tokens, self.facts(tokens, routing, placement))
        if len(set(num_tokens)) > 1:
            raise DispatchError(
                f"{self.layer}: the ranks have {', '.join(map(str, num_tokens))} tokens. Replicated dispatch needs the "
                "same tokens on every rank of the expert-parallel group."
            )
        counted_here = routing.topk_ids[self.group.rank :: self.group.size]  # each token once over the ranks
        num_rows_needed = self.count(self.locate(counted_here, placement)[0])
        return Plan(routing, num_rows_needed, *self.pairs_here(routing.topk_ids, placement))

    def dispatch(self, tokens: Tensor, plan: Plan) -> Steps[Arrived]:
        flights = [ShareExchange(self.group).depart(values) for values in (tokens, plan.routing.topk_weights)]
        yield from under_way(*flights)
        (tokens,), (weights,) = (flight.arrive() for flight in flights)
        return plan.arrived(tokens, weights)

    def combine(self, partial_sums: Tensor, plan: Plan) -> Steps[Tensor]:
        flight = AllReduceExchange(self.group).depart(partial_sums)
        yield from under_way(flight)
        (total,) = flight.arrive()
        return total
