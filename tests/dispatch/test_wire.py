"""Rows and weights come off the wire bit for bit, and their gradients with them."""

from __future__ import annotations

import pytest
import torch

from ds_hybrid.dispatch.wire import pack, unpack, weight_dtype_on_wire


@pytest.mark.parametrize("num_rows", [0, 5])
@pytest.mark.parametrize("rows", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_round_trip_is_exact(rows: torch.dtype, num_rows: int) -> None:
    values = torch.randn(num_rows, 6).to(rows).requires_grad_()
    weights = torch.rand(num_rows, 3).to(weight_dtype_on_wire(rows, torch.float32)).requires_grad_()
    packed = pack(values, weights)
    assert packed.dtype == rows
    assert packed.nbytes == values.nbytes + weights.nbytes
    back_values, back_weights = unpack(packed, 3, weights.dtype)
    assert torch.equal(back_values, values)
    assert torch.equal(back_weights, weights)

    upstream = torch.randn(num_rows, 6).to(rows), torch.rand(num_rows, 3).to(weights.dtype)
    torch.autograd.backward([back_values, back_weights], list(upstream))
    assert values.grad is not None
    assert weights.grad is not None
    assert torch.equal(values.grad, upstream[0])
    assert torch.equal(weights.grad, upstream[1])


def test_weights_are_never_narrower_than_values() -> None:
    assert weight_dtype_on_wire(torch.bfloat16, torch.float32) == torch.float32
    assert weight_dtype_on_wire(torch.float64, torch.float32) == torch.float64
