"""Copies of tokens as rows, and the sum of rows back into tokens.

Experts work on rows; tokens become rows by copying and rows become tokens by adding. The two are adjoint: the backward
of one is the other, so one integer map serves both, and both directions add in a fixed order (bit-equal on every run).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from ds_hybrid.dispatch.routing import count_values


@dataclass(frozen=True)
class RowMap:
    """R rows that stand for cells of a [T, M] table: cell (t, m) is the m-th copy of token t, or unused.

    Attributes:
        cell_of_row: [R] int64, t * M + m, all different.
        rows_by_cell: [R] int64, the rows in the order of their cells.
        first_of_token: [T] int64, where each token's rows begin in ``rows_by_cell``.
        num_copies: M.
    """

    cell_of_row: Tensor
    rows_by_cell: Tensor
    first_of_token: Tensor
    num_copies: int

    @classmethod
    def of(cls, cell_of_row: Tensor, num_tokens: int, num_copies: int) -> RowMap:
        row_of_cell = cell_of_row.new_full((num_tokens * num_copies,), -1)
        row_of_cell[cell_of_row] = torch.arange(len(cell_of_row), device=cell_of_row.device)
        is_used = row_of_cell >= 0
        used_cells = is_used.nonzero_static(size=len(cell_of_row))[:, 0]
        rows_of_token = is_used.view(num_tokens, num_copies).sum(1)
        return cls(cell_of_row, row_of_cell[used_cells], rows_of_token.cumsum(0) - rows_of_token, num_copies)

    @property
    def num_tokens(self) -> int:
        return len(self.first_of_token)


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
    return _Expand.apply(tokens, rows.cell_of_row, rows.rows_by_cell, rows.first_of_token, rows.num_copies)


def weighted_sum(values: Tensor, rows: RowMap, weights: Tensor | None = None) -> Tensor:
    """Add the rows of each token, each times its weight: the weights are 1 where none are given.

    Args:
        values: [R, H].
        weights: [T, M], one weight per cell; float32 for values of up to 32 bits.

    Returns:
        [T, H] in the dtype of ``values``; the sum runs over m = 0, 1, ... in float32 (float64 for float64) and is
        rounded once. A token without rows is 0.
    """
    if weights is None:
        return _Sum.apply(values, rows.cell_of_row, rows.rows_by_cell, rows.first_of_token, rows.num_copies)
    return _WeightedSum.apply(values, weights, rows.cell_of_row, rows.rows_by_cell, rows.first_of_token)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, cell_of_row: Tensor, rows_by_cell: Tensor, first_of_token: Tensor, num_copies: int
    ) -> Tensor:
        ctx.num_copies = num_copies
        ctx.save_for_backward(rows_by_cell, first_of_token)
        return tokens.index_select(0, cell_of_row // num_copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows_by_cell, first_of_token = ctx.saved_tensors
        return sum_rows(grad_rows, rows_by_cell, first_of_token, ctx.num_copies), None, None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, cell_of_row: Tensor, rows_by_cell: Tensor, first_of_token: Tensor, num_copies: int
    ) -> Tensor:
        ctx.num_copies = num_copies
        ctx.save_for_backward(cell_of_row)
        return sum_rows(values, rows_by_cell, first_of_token, num_copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tokens: Tensor) -> tuple[Tensor, None, None, None, None]:
        (cell_of_row,) = ctx.saved_tensors
        return grad_tokens.index_select(0, cell_of_row // ctx.num_copies), None, None, None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weights: Tensor, cell_of_row: Tensor, rows_by_cell: Tensor, first_of_token: Tensor
    ) -> Tensor:
        ctx.save_for_backward(values, weights, cell_of_row)
        weight_of_row = weights.reshape(-1).index_select(0, cell_of_row)
        weights_by_cell = weight_of_row.index_select(0, rows_by_cell)
        return sum_rows(values, rows_by_cell, first_of_token, weights.shape[1], weights_by_cell)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tokens: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        values, weights, cell_of_row = ctx.saved_tensors
        grad_rows = grad_tokens.index_select(0, cell_of_row // weights.shape[1]).to(_sum_dtype(values))
        grad_weights = torch.zeros_like(weights).view(-1)
        grad_weights[cell_of_row] = torch.linalg.vecdot(grad_rows, values.to(grad_rows.dtype)).to(weights.dtype)
        weight_of_row = weights.reshape(-1).index_select(0, cell_of_row)
        grad_values = grad_rows.mul_(weight_of_row[:, None]).to(values.dtype)
        return grad_values, grad_weights.view_as(weights), None, None, None


def sum_rows(
    values: Tensor,
    rows_by_cell: Tensor,
    first_of_token: Tensor,
    num_copies: int,
    weights_by_cell: Tensor | None = None,
) -> Tensor:
    """The forward of :func:`weighted_sum`, of a map's parts: rows [R, H] -> tokens [T, H]; not differentiable."""
    num_tokens = len(first_of_token)
    if weights_by_cell is None and num_copies == 1 and len(rows_by_cell) == num_tokens:
        return values.index_select(0, rows_by_cell)
    if not len(values):
        return values.new_zeros((num_tokens, values.shape[1]))
    exact = values.to(_sum_dtype(values))
    weights = None if weights_by_cell is None else weights_by_cell.to(exact.dtype)
    total = embedding_bag(rows_by_cell, exact, first_of_token, mode="sum", per_sample_weights=weights)
    return total.to(values.dtype)


def _sum_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
