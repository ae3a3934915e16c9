"""Every token to every rank; each rank returns one weighted partial sum per token.

Its volume never grows with top-k or skew, so it wins where the group is smaller than top-k. Source of the scheme: the
AllGather dispatcher of Megatron-Core; the routing is gathered as K ids per token, never as a dense [T, E] table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.dispatch.collectives import all_gather_rows, reduce_scatter_rows
from ds_hybrid.dispatch.gathering import GatheringDispatcher
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.dispatch.rows import RowMap, expand, group_by_slot, weighted_sum
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class AllGatherState:
    """Which gathered tokens this rank's experts worked on, with all ranks' weights [P * T_max, K]."""

    pairs: RowMap
    gathered_weights: Tensor
    num_tokens: int
    num_rows_needed: Tensor


class AllGatherDispatcher(GatheringDispatcher):
    """Gathers tokens and weights, padded to the longest rank; reduce-scatters the partial sums."""

    mode = "allgather"

    def dispatch(
        self, tokens: Tensor, routing: Routing, placement: ExpertPlacement
    ) -> tuple[Tensor, Tensor, AllGatherState]:
        gathered = self.gather_routing(tokens, routing, placement)
        own_ranks = gathered.rank_of_choice[self.group.rank, : routing.num_tokens]
        _, num_rows_needed = self.rows_needed(own_ranks)
        slots = gathered.local_slots(self.group.rank)
        pairs, num_rows_per_slot = group_by_slot(slots, placement.num_slots, int((slots >= 0).sum()))

        self.group.meter.add_tokens(routing.num_tokens)
        padded_tokens = _pad(self.crossing(tokens, num_rows_needed), gathered.num_padded_tokens)
        all_tokens = all_gather_rows(padded_tokens, self.group)
        all_weights = all_gather_rows(_pad(routing.topk_weights, gathered.num_padded_tokens), self.group)
        state = AllGatherState(pairs, all_weights, routing.num_tokens, num_rows_needed)
        return expand(all_tokens, pairs), num_rows_per_slot, state

    def combine(self, expert_rows: Tensor, state: AllGatherState) -> Tensor:
        partial_sums = weighted_sum(expert_rows, state.pairs, state.gathered_weights)
        partial_sums = self.crossing(partial_sums, state.num_rows_needed)
        return reduce_scatter_rows(partial_sums, self.group)[: state.num_tokens]


def _pad(rows: Tensor, num_rows: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, num_rows - len(rows)))
