"""Expand and weighted_sum are adjoint, add in a fixed order, and have right gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_hybrid.dispatch.rows import RowMap, expand, group_by_slot, weighted_sum

NUM_TOKENS, NUM_COPIES, HIDDEN = 7, 3, 5


@pytest.fixture
def rows() -> RowMap:
    """Twelve of the 7 x 3 cells in a random order; token 4 has no row."""
    cells = torch.randperm(NUM_TOKENS * NUM_COPIES, generator=torch.Generator().manual_seed(0))
    return RowMap.of(cells[cells // NUM_COPIES != 4][:12], NUM_TOKENS, NUM_COPIES)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_row_map_is_its_own_inverse(rows: RowMap) -> None:
    assert rows.cell_of_row[rows.rows_by_cell].tolist() == sorted(rows.cell_of_row.tolist())
    ends = [*rows.first_of_token.tolist(), 12][1:]
    for token, (first, end) in enumerate(zip(rows.first_of_token.tolist(), ends, strict=True)):
        cells = rows.cell_of_row[rows.rows_by_cell[first:end]]
        assert (cells // NUM_COPIES == token).all()
    assert rows.num_tokens == NUM_TOKENS


def test_expand_and_sum_are_adjoint(rows: RowMap) -> None:
    tokens, values = normal(NUM_TOKENS, HIDDEN), normal(12, HIDDEN)
    left, right = (expand(tokens, rows) * values).sum(), (tokens * weighted_sum(values, rows)).sum()
    assert float(left) == pytest.approx(float(right), rel=1e-14)


def test_gradients_equal_finite_differences(rows: RowMap) -> None:
    tokens = normal(NUM_TOKENS, HIDDEN).requires_grad_()
    values = normal(12, HIDDEN).requires_grad_()
    weights = normal(NUM_TOKENS, NUM_COPIES).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: expand(t, rows), (tokens,))
    assert torch.autograd.gradcheck(lambda v: weighted_sum(v, rows), (values,))
    assert torch.autograd.gradcheck(lambda v, w: weighted_sum(v, rows, w), (values, weights))


def test_a_token_without_rows_is_zero_whatever_the_rows_hold(rows: RowMap) -> None:
    values = torch.full((12, HIDDEN), float("nan"), dtype=torch.float64)
    assert weighted_sum(values, rows)[4].tolist() == [0.0] * HIDDEN


def test_bf16_rows_add_in_float32_and_round_once() -> None:
    rows = RowMap.of(torch.arange(3), 1, 3)
    values = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert weighted_sum(values, rows).item() == 258.0  # in bf16 steps: 256 + 1 = 256, 256 + 1 = 256


def test_no_rows_and_no_tokens() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    without_rows = RowMap.of(empty, 2, 3)
    assert weighted_sum(torch.empty(0, 4), without_rows, torch.ones(2, 3)).tolist() == [[0.0] * 4] * 2
    without_tokens = RowMap.of(empty, 0, 3)
    assert expand(torch.empty(0, 4), without_tokens).shape == (0, 4)
    assert weighted_sum(torch.empty(0, 4), without_tokens).shape == (0, 4)


def test_group_by_slot_sorts_by_slot_then_cell() -> None:
    slots = torch.tensor([[2, -1], [0, 2], [-1, -1], [2, 0]])
    rows, counts = group_by_slot(slots, num_slots=4, num_rows=5)
    assert rows.cell_of_row.tolist() == [2, 7, 0, 3, 6]
    assert rows.rows_by_cell.tolist() == [2, 0, 3, 4, 1]
    assert rows.first_of_token.tolist() == [0, 1, 3, 3]
    assert counts.tolist() == [2, 0, 3, 0]


def test_a_second_derivative_is_refused_and_not_wrong(rows: RowMap) -> None:
    tokens = normal(NUM_TOKENS, HIDDEN).requires_grad_()
    (gradient,) = torch.autograd.grad(expand(tokens, rows).square().sum(), tokens, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
