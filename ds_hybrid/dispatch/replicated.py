"""The expert-parallel group lies inside a tensor-parallel group: every rank has the same tokens already.

Nothing is dispatched. Each rank runs its experts on all tokens, and one all-reduce adds the weighted partial sums. In
backward the gradients of tokens and weights, which each rank knows only for its own experts, are all-reduced, so every
rank ends with the whole gradient, the router's included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.exchanges import AllReduceExchange, Flight
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.dispatch.rows import RowMap, expand, weighted_sum
from ds_hybrid.errors import DispatchError
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class ReplicatedState:
    """Tokens and weights on this rank, and which (token, choice) pairs its experts work on."""

    tokens: Tensor
    topk_weights: Tensor
    pairs: RowMap
    num_rows_per_slot: Tensor


class ReplicatedDispatcher(Dispatcher):
    """Takes the same tokens and routing on every rank; gives the same output on every rank.

    The loss after it is one loss that every rank computes, not a sum over ranks.
    """

    mode = "replicated"

    def start_dispatch(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> ReplicatedState:
        self.group.meter.add_tokens(routing.num_tokens)
        num_tokens = self.gather_counts(self.group, routing.num_tokens, self.facts(tokens, routing, placement))
        if len(set(num_tokens)) > 1:
            raise DispatchError(
                f"{self.layer}: the ranks have {', '.join(map(str, num_tokens))} tokens. Replicated dispatch needs the "
                "same tokens on every rank of the expert-parallel group."
            )
        pairs, num_rows_per_slot = self.pairs_here(routing.topk_ids, placement)
        tokens = _SumGradients.apply(tokens, self.group)
        weights = _SumGradients.apply(routing.topk_weights, self.group)
        return ReplicatedState(tokens, weights, pairs, num_rows_per_slot)

    def finish_dispatch(self, started: ReplicatedState) -> tuple[Tensor, Tensor, ReplicatedState]:
        return expand(started.tokens, started.pairs), started.num_rows_per_slot, started

    def start_combine(self, expert_rows: Tensor, state: ReplicatedState) -> Flight:
        return AllReduceExchange(self.group).depart(weighted_sum(expert_rows, state.pairs, state.topk_weights))

    def finish_combine(self, flight: Flight, state: ReplicatedState) -> Tensor:
        (total,) = flight.arrive()
        return total


class _SumGradients(torch.autograd.Function):
    """The identity; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(gradient).wait(), None
