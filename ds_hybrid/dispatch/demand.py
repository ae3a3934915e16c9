"""What routings ask for: how many rows each way of dispatching would send to whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.dispatch.routing import count_values, ranks_needed


@dataclass(frozen=True)
class Demand:
    """Of one rank's tokens, as int64 counts on their device; nothing here has been read back.

    Attributes:
        pairs: [P], (token, choice) pairs whose expert lives on each rank.
        rows: [P], tokens that need each rank, each token once.
        rows_to_node: [P], tokens that need each node, each token once: node n at n, and zeros behind the last node; [0]
            where the nodes are not known.
    """

    pairs: Tensor
    rows: Tensor
    rows_to_node: Tensor


def demand_of(rank_of_choice: Tensor, *, num_ranks: int, node_of_rank: Tensor | None = None) -> Demand:
    """Count the choices of this rank's tokens.

    Args:
        rank_of_choice: [T, K], the rank that holds each choice.
        node_of_rank: [P] int64, the node of each rank, of as many nodes as ranks at most.
    """
    rows = ranks_needed(rank_of_choice, num_ranks).sum(0)
    rows_to_node = rows[:0]
    if node_of_rank is not None:
        rows_to_node = ranks_needed(node_of_rank[rank_of_choice], num_ranks).sum(0)
    return Demand(count_values(rank_of_choice, num_ranks), rows, rows_to_node)


class DemandTotal:
    """Adds up the demand of a layer's calls on the device."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, demand: Demand, *, num_tokens: int) -> None:
        """Add one call."""
        of_call = demand.rows.new_tensor([num_tokens, 1])
        counts = torch.cat([demand.pairs, demand.rows, demand.rows_to_node, of_call])
        self._total = counts if self._total is None else self._total + counts

    def take(self) -> Tensor | None:
        """Pairs, rows, rows to nodes, tokens and calls since the last time: [2 P + 2] or [3 P + 2] int64, or None."""
        total, self._total = self._total, None
        return total
