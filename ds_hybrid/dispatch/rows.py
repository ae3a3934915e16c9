"""Copies of tokens as rows, and the sum of rows back into tokens.

Experts work on rows; tokens become rows by copying and rows become tokens by adding. The two are adjoint: the backward
of one is the other, so one integer map serves both, and both directions add in a fixed order (bit-equal on every run).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hybrid.dispatch.routing import count_values


@dataclass(frozen=True)
class RowMap:
    """R rows that stand for cells of a [T, M] table: cell (t, m) is the m-th copy of token t, or unused.

    Attributes:
        cell_of_row: [R] int64, t * M + m, all different.
        row_of_cell: [T, M] int64, -1 where no row stands for the cell.
    """

    cell_of_row: Tensor
    row_of_cell: Tensor

    @classmethod
    def of(cls, cell_of_row: Tensor, num_tokens: int, num_copies: int) -> RowMap:
        row_of_cell = cell_of_row.new_full((num_tokens * num_copies,), -1)
        row_of_cell[cell_of_row] = torch.arange(len(cell_of_row), device=cell_of_row.device)
        return cls(cell_of_row, row_of_cell.view(num_tokens, num_copies))


def group_by_slot(slot_of_cell: Tensor, num_slots: int, num_rows: int) -> tuple[RowMap, Tensor]:
    """One row per used cell, sorted by slot and inside a slot by cell.

    Args:
        slot_of_cell: [N, M] int64, the local slot that works on the cell, -1 for none.
        num_rows: R, how many cells are used (known on the host, so nothing waits for the device).

    Returns:
        The map [R rows <-> N, M] and the number of rows of each slot, [num_slots] int64.
    """
    key = torch.where(slot_of_cell < 0, num_slots, slot_of_cell).reshape(-1)
    cells = torch.argsort(key, stable=True)[:num_rows]
    return RowMap.of(cells, *slot_of_cell.shape), count_values(key, num_slots + 1)[:num_slots]


def expand(tokens: Tensor, rows: RowMap) -> Tensor:
    """Copy tokens to rows. [T, H] -> [R, H]; backward adds the rows of a token (in float32, rounded once)."""
    return _Expand.apply(tokens, rows.cell_of_row, rows.row_of_cell)


def weighted_sum(values: Tensor, rows: RowMap, weights: Tensor | None = None) -> Tensor:
    """Add the rows of each token, each times its weight: the weights are 1 where none are given.

    Args:
        values: [R, H].
        weights: [T, M], one weight per cell; float32 for values of up to 32 bits.

    Returns:
        [T, H] in the dtype of ``values``; the sum runs over m = 0, 1, ... in float32 (float64 for float64) and is
        rounded once. A token without rows is 0.
    """
    return _WeightedSum.apply(values, weights, rows.cell_of_row, rows.row_of_cell)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, cell_of_row: Tensor, row_of_cell: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_cell)
        return tokens.index_select(0, cell_of_row // row_of_cell.shape[1])

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None, None]:
        (row_of_cell,) = ctx.saved_tensors
        return _sum_rows(grad_rows, row_of_cell, None), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor | None, cell_of_row: Tensor, row_of_cell: Tensor) -> Tensor:
        ctx.num_copies = row_of_cell.shape[1]
        ctx.save_for_backward(cell_of_row, *(() if weights is None else (values, weights)))
        return _sum_rows(values, row_of_cell, weights)

    @staticmethod
    def backward(ctx: Any, grad_tokens: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        cell_of_row, *weighted = ctx.saved_tensors
        grad_rows = grad_tokens.index_select(0, cell_of_row // ctx.num_copies)
        if not weighted:
            return grad_rows, None, None, None
        values, weights = weighted
        exact = grad_rows.to(_sum_dtype(values))
        grad_weights = torch.zeros_like(weights).view(-1)
        grad_weights[cell_of_row] = (exact * values).sum(1).to(weights.dtype)
        weight_of_row = weights.reshape(-1).index_select(0, cell_of_row)
        return (exact * weight_of_row[:, None]).to(values.dtype), grad_weights.view_as(weights), None, None


def _sum_rows(values: Tensor, row_of_cell: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None and row_of_cell.shape == (len(values), 1):
        return values.index_select(0, row_of_cell[:, 0])
    total = values.new_zeros((row_of_cell.shape[0], values.shape[1]), dtype=_sum_dtype(values))
    if len(values):
        for copy in range(row_of_cell.shape[1]):
            row = row_of_cell[:, copy]
            part = values.index_select(0, row.clamp_min(0)).to(total.dtype)
            if weights is not None:
                part = part * weights[:, copy, None]
            total += part.masked_fill_((row < 0)[:, None], 0)
    return total.to(values.dtype)


def _sum_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
