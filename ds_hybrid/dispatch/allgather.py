"""Every token to every rank; each rank returns one weighted partial sum per token.

Its volume never grows with top-k or skew, so it wins where the group is smaller than top-k. Source of the scheme: the
AllGather dispatcher of Megatron-Core; the routing is gathered as K ids per token, never as a dense [T, E] table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.exchanges import Flight, ReduceScatterExchange
from ds_hybrid.dispatch.gathering import gather_ids
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.dispatch.rows import RowMap, expand, weighted_sum
from ds_hybrid.dispatch.wire import GatherExchange
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class AllGatherStarted:
    """All ranks' tokens and weights on their way, and which of them this rank's experts will work on."""

    tokens: Flight
    weights: Flight
    pairs: RowMap
    num_rows_per_slot: Tensor
    num_tokens: int
    num_rows_needed: Tensor


@dataclass(frozen=True)
class AllGatherState:
    """What was started, with all ranks' weights [P * T_max, K]."""

    started: AllGatherStarted
    gathered_weights: Tensor


class AllGatherDispatcher(Dispatcher):
    """Gathers tokens and weights, padded to the longest rank; reduce-scatters the partial sums."""

    mode = "allgather"

    def start_dispatch(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> AllGatherStarted:
        self.group.meter.add_tokens(routing.num_tokens)
        counts = self.gather_counts(self.group, routing.num_tokens, self.facts(tokens, routing, placement))
        all_ids = gather_ids(self.group, routing.topk_ids, counts, routing.num_experts)
        pairs, num_rows_per_slot = self.pairs_here(all_ids.flatten(0, 1), placement)

        num_rows_needed = self.num_rows_needed(self.locate(routing.topk_ids, placement)[0])
        padded_tokens = _pad(self.crossing(tokens, num_rows_needed), max(counts))
        return AllGatherStarted(
            GatherExchange(self.group, self.wire_dtype).depart(padded_tokens),
            GatherExchange(self.group).depart(_pad(routing.topk_weights, max(counts))),
            pairs,
            num_rows_per_slot,
            routing.num_tokens,
            num_rows_needed,
        )

    def finish_dispatch(self, started: AllGatherStarted) -> tuple[Tensor, Tensor, AllGatherState]:
        (tokens,), (weights,) = started.tokens.arrive(), started.weights.arrive()
        return expand(tokens, started.pairs), started.num_rows_per_slot, AllGatherState(started, weights)

    def start_combine(self, expert_rows: Tensor, state: AllGatherState) -> Flight:
        partial_sums = weighted_sum(expert_rows, state.started.pairs, state.gathered_weights)
        partial_sums = self.crossing(partial_sums, state.started.num_rows_needed)
        return ReduceScatterExchange(self.group).depart(partial_sums)

    def finish_combine(self, flight: Flight, state: AllGatherState) -> Tensor:
        (total,) = flight.arrive()
        return total[: state.started.num_tokens]


def _pad(rows: Tensor, num_rows: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, num_rows - len(rows)))
