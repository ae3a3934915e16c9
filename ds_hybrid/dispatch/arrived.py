"""Tokens on the rank of their experts: what a dispatcher hands to the experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ds_hybrid.dispatch.rows import RowMap, expand, weighted_sum


@dataclass(frozen=True)
class Arrived:
    """N tokens, of which each choice for an expert of this rank is one row to compute.

    Attributes:
        tokens: [N, H].
        pairs: R rows, sorted by local slot, that stand for cells of [N, M].
        num_rows_per_slot: [E/P] int64, sums to R.
        weights: [N, M] float32 (float64 for float64 tokens), or None where the tokens' own rank weighs.
    """

    tokens: Tensor
    pairs: RowMap
    num_rows_per_slot: Tensor
    weights: Tensor | None

    def rows(self) -> Tensor:
        """[R, H], what the experts read."""
        return expand(self.tokens, self.pairs)

    def add(self, expert_rows: Tensor) -> Tensor:
        """What the experts computed for the rows [R, H] -> [N, H]: for each token the weighted sum of its rows."""
        return weighted_sum(expert_rows, self.pairs, self.weights)


Experts = Callable[[Arrived], Tensor]
"""The experts of a rank: N tokens that arrived -> [N, H], for each the (weighted) sum over this rank's experts."""


def by_rows(run: Callable[[Tensor, Tensor], Tensor]) -> Experts:
    """Experts from a function of rows [R, H] sorted by slot, and how many each slot has [E/P] -> [R, H]."""
    return lambda arrived: arrived.add(run(arrived.rows(), arrived.num_rows_per_slot))
