"""Gated experts with routing weights as one differentiable function, which keeps little for backward.

An expert is w2 (act(w1 x) * (w3 x)). Its routing weight is applied to the hidden values in place of the output: the sum
is the same, and the gradient of the weight then needs no output. So backward keeps the tokens once, however many
experts work on them, with gate and up of each row, and computes the rows and the hidden values again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.moe.ep_experts import apply_expert_activation
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hybrid.dispatch.rows import RowMap, sum_rows


@dataclass(frozen=True)
class Activation:
    """The form act(gate) * up, by DeepSpeed's name and with its two scalars."""

    name: str
    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return apply_expert_activation(gate, up, self.name, self.alpha, self.limit)


@dataclass(frozen=True)
class RowGroups:
    """Rows sorted by slot, each slot's run filled up with empty rows to a whole multiple.

    Attributes:
        cell_of_row: [R'] int64, -1 where the row is filling.
        rows_by_cell, first_of_token: as in :class:`ds_hybrid.dispatch.rows.RowMap`.
        ends: [S] int32, where each slot's run ends.
        num_copies: M.
    """

    cell_of_row: Tensor
    rows_by_cell: Tensor
    first_of_token: Tensor
    ends: Tensor
    num_copies: int


def align_groups(pairs: RowMap, num_rows_per_slot: Tensor, alignment: int) -> RowGroups:
    """Fill each slot's run of rows up to a multiple of ``alignment`` rows; an empty one to one multiple.

    R' is known on the host (the most it can be), so nothing waits for the device. With 1 nothing is filled.
    """
    if alignment == 1:
        ends = num_rows_per_slot.cumsum(0, dtype=torch.int32)
        return RowGroups(pairs.cell_of_row, pairs.rows_by_cell, pairs.first_of_token, ends, pairs.num_copies)
    num_rows, num_slots = len(pairs.cell_of_row), len(num_rows_per_slot)
    sizes = (num_rows_per_slot.clamp_min(1) + alignment - 1) // alignment * alignment
    filling_before = (sizes - num_rows_per_slot).cumsum(0) - (sizes - num_rows_per_slot)
    positions = torch.arange(num_rows, device=sizes.device)
    positions += filling_before.repeat_interleave(num_rows_per_slot, output_size=num_rows)
    cell_of_row = positions.new_full((num_rows + num_slots * alignment,), -1)
    cell_of_row[positions] = pairs.cell_of_row
    ends = sizes.cumsum(0, dtype=torch.int32)
    return RowGroups(cell_of_row, positions[pairs.rows_by_cell], pairs.first_of_token, ends, pairs.num_copies)


def weighted_experts(
    tokens: Tensor,
    weights: Tensor | None,
    parameters: tuple[Tensor, Tensor, Tensor],
    groups: RowGroups,
    activation: Activation,
) -> Tensor:
    """For each token the sum over its rows of weight x expert.

    Args:
        tokens: [N, H].
        weights: [N, M], one per cell, or None for 1.
        parameters: w1 [S, F, H], w2 [S, H, F] and w3 [S, F, H].

    Returns:
        [N, H] in the dtype of ``tokens``; rows are added in float32 (float64 for float64) and rounded once.
    """
    indices = (groups.cell_of_row, groups.rows_by_cell, groups.first_of_token, groups.ends)
    return _WeightedExperts.apply(tokens, weights, *parameters, *indices, groups.num_copies, activation)


class _WeightedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weights: Tensor | None,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        cell_of_row: Tensor,
        rows_by_cell: Tensor,
        first_of_token: Tensor,
        ends: Tensor,
        num_copies: int,
        activation: Activation,
    ) -> Tensor:
        groups = RowGroups(cell_of_row, rows_by_cell, first_of_token, ends, num_copies)
        rows = _take(tokens, groups)
        gate, up = _product(rows, w1, groups), _product(rows, w3, groups)
        hidden = _weigh_(activation(gate, up), _weight_of_row(weights, groups))
        output = _product(hidden, w2, groups)
        ctx.save_for_backward(tokens, weights, w1, w2, w3, gate, up, cell_of_row, rows_by_cell, first_of_token, ends)
        ctx.num_copies, ctx.activation = num_copies, activation
        return sum_rows(output, rows_by_cell, first_of_token, num_copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weights, w1, w2, w3, gate, up, cell_of_row, rows_by_cell, first_of_token, ends = ctx.saved_tensors
        groups = RowGroups(cell_of_row, rows_by_cell, first_of_token, ends, ctx.num_copies)
        weight_of_row = _weight_of_row(weights, groups)
        with torch.enable_grad():
            gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
            hidden = ctx.activation(gate, up)

        grad_outputs = _take(grad_sums, groups)
        grad_weighted = _product_of_gradient(grad_outputs, w2, groups)
        wants_tokens, wants_weights, *wants_parameters = ctx.needs_input_grad[:5]
        grad_tokens = grad_weights = None
        if wants_weights:
            grad_of_row = torch.linalg.vecdot(grad_weighted.to(weights.dtype), hidden.detach().to(weights.dtype))
            grad_weights = weights.new_zeros(weights.numel() + 1)
            grad_weights[groups.cell_of_row] = grad_of_row  # filling lands in the last place
            grad_weights = grad_weights[:-1].view_as(weights)
        grad_gate, grad_up = torch.autograd.grad(hidden, (gate, up), _weigh_(grad_weighted, weight_of_row))
        hidden = hidden.detach()
        if wants_tokens:
            grad_rows = _product_of_gradient(grad_gate, w1, groups).add_(_product_of_gradient(grad_up, w3, groups))
            grad_tokens = sum_rows(grad_rows, groups.rows_by_cell, groups.first_of_token, groups.num_copies)
        rows = _take(tokens, groups)
        of_parameter = ((grad_gate, rows), (grad_outputs, _weigh_(hidden, weight_of_row)), (grad_up, rows))
        grad_parameters = [
            _gradient_of_parameter(*pair, groups).to(parameter.dtype) if wanted else None
            for pair, parameter, wanted in zip(of_parameter, (w1, w2, w3), wants_parameters, strict=True)
        ]
        return grad_tokens, grad_weights, *grad_parameters, *[None] * 6


def _take(tokens: Tensor, groups: RowGroups) -> Tensor:
    """[N, H] -> [R', H]; filling is 0."""
    if len(groups.rows_by_cell) == len(groups.cell_of_row):
        return tokens.index_select(0, groups.cell_of_row // groups.num_copies)
    if not len(tokens):
        return tokens.new_zeros((len(groups.cell_of_row), tokens.shape[1]))
    rows = tokens.index_select(0, groups.cell_of_row.clamp_min(0) // groups.num_copies)
    return rows.masked_fill_(groups.cell_of_row[:, None] < 0, 0)


def _weight_of_row(weights: Tensor | None, groups: RowGroups) -> Tensor | None:
    """[N, M] -> [R']; that of filling is 0."""
    if weights is None:
        return None
    return torch.cat([weights.reshape(-1), weights.new_zeros(1)])[groups.cell_of_row]


def _weigh_(values: Tensor, weight_of_row: Tensor | None) -> Tensor:
    """Multiply in place, in the dtype of the weights, and round once."""
    return values if weight_of_row is None else values.mul_(weight_of_row[:, None])


def _product(rows: Tensor, parameter: Tensor, groups: RowGroups) -> Tensor:
    """Each slot's rows [R', A] times its matrix of [S, B, A], transposed: [R', B]."""
    return torch._grouped_mm(rows, parameter.to(rows.dtype).transpose(1, 2), offs=groups.ends)


def _product_of_gradient(gradient: Tensor, parameter: Tensor, groups: RowGroups) -> Tensor:
    """The gradient of :func:`_product` with respect to its rows: [R', B] -> [R', A]."""
    return torch._grouped_mm(gradient, parameter.to(gradient.dtype), offs=groups.ends)


def _gradient_of_parameter(gradient: Tensor, rows: Tensor, groups: RowGroups) -> Tensor:
    """That with respect to its matrices: [R', B] and [R', A] -> [S, B, A]."""
    return torch._grouped_mm(gradient.t(), rows, offs=groups.ends)
