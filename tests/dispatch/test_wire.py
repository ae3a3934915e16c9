"""Rows and weights come off the wire bit for bit, and their gradients with them; no NaN is seen where there is none."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from ds_hybrid.dispatch.collectives import RankGroup, Transfer
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.wire import WeightedRowsExchange, decode, encode


class Loopback(RankGroup):
    """Two ranks of which the other is this one: what is sent arrives, and is kept."""

    def __init__(self) -> None:
        self.size, self.rank, self.meter = 2, 0, Meter()
        self.sent: list[torch.Tensor] = []
        self.received: list[torch.Tensor] = []

    def _all_to_all(self, rows: torch.Tensor, *_: Any) -> Transfer:
        received = rows.clone()
        self.sent.append(rows)
        self.received.append(received)
        return Transfer(None, lambda: received)


@pytest.mark.parametrize("num_rows", [0, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_round_trip_is_exact(dtype: torch.dtype, num_rows: int) -> None:
    group = Loopback()
    rows = torch.randn(num_rows, 6).to(dtype).requires_grad_()
    weights = torch.rand(num_rows, 3).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    counts = [num_rows - 1, 1] if num_rows else [0, 0]
    got_rows, got_weights = WeightedRowsExchange(group, counts, counts).depart(rows, weights).arrive()
    assert torch.equal(got_rows, rows)
    assert torch.equal(got_weights, weights)
    assert group.sent[0].dtype == torch.uint8
    assert group.sent[0].nbytes == rows.nbytes + weights.nbytes

    upstream = torch.randn(num_rows, 6).to(dtype), torch.rand(num_rows, 3).to(weights.dtype)
    grads = torch.autograd.grad([got_rows, got_weights], [rows, weights], list(upstream))
    assert torch.equal(grads[0], upstream[0])
    assert torch.equal(grads[1], upstream[1])


def test_weights_whose_bits_look_like_nan_do_not_alarm_autograd() -> None:
    rows = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    bits = torch.tensor([[0x3F807FC0]], dtype=torch.int32)
    weights = bits.view(torch.float32).requires_grad_()
    assert weights.detach().view(torch.bfloat16).isnan().any()
    with torch.autograd.set_detect_anomaly(True):
        got_rows, got_weights = WeightedRowsExchange(Loopback(), [1, 0], [1, 0]).depart(rows, weights).arrive()
        torch.autograd.backward([got_rows, got_weights], [torch.ones_like(got_rows), weights.detach().clone()])
    assert weights.grad is not None
    assert torch.equal(weights.grad, weights)


@pytest.mark.parametrize("num_rows", [0, 7])
@pytest.mark.parametrize("hidden_size", [128, 200, 5])
def test_fp8_is_close_in_every_block(num_rows: int, hidden_size: int) -> None:
    rows = torch.randn(num_rows, hidden_size) * torch.logspace(-6, 6, hidden_size)
    wire = encode(rows, "fp8_e4m3")
    assert wire.shape == (num_rows, hidden_size + 4 * -(-hidden_size // 128))
    back = decode(wire, hidden_size, torch.float32, "fp8_e4m3")
    for block, exact in zip(back.split(128, 1), rows.split(128, 1), strict=True):
        # e4m3 has three bits after the point: half a step is 1/16 of a value, and 2**-10 of 448 where values are small.
        bound = torch.maximum(exact.abs() / 16, exact.abs().amax(1, keepdim=True) * 2**-10 / 448)
        assert ((block - exact).abs() <= bound).all()


def test_fp8_of_zeros_tiny_values_and_values_that_are_not_finite() -> None:
    rows = torch.ones(4, 256)
    rows[0] = 0.0
    rows[1] = 1e-44
    rows[2, 3] = float("inf")
    rows[3, 200] = float("nan")
    back = decode(encode(rows, "fp8_e4m3"), 256, torch.float32, "fp8_e4m3")
    assert back[:2].abs().max() <= 1e-43
    assert back[2, :128].isnan().all()
    assert torch.equal(back[2, 128:], torch.ones(128))
    assert torch.equal(back[3, :128], torch.ones(128))
    assert back[3, 128:].isnan().all()


def test_a_block_that_was_rounded_before_stays_as_it_is() -> None:
    """So a second hop adds no error."""
    rows = torch.randn(5, 300)
    once = decode(encode(rows, "fp8_e4m3"), 300, torch.float32, "fp8_e4m3")
    twice = decode(encode(once, "fp8_e4m3"), 300, torch.float32, "fp8_e4m3")
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)


def test_an_exchange_lets_go_of_what_it_brought() -> None:
    """Neither the sent bytes nor the received ones stay alive until backward."""
    group = Loopback()
    exchange = WeightedRowsExchange(group, [2, 0], [2, 0])
    rows, weights = exchange.depart(torch.randn(2, 4, requires_grad=True), torch.rand(2, 1)).arrive()
    held = [weakref.ref(group.sent.pop()), weakref.ref(group.received.pop())]
    total = rows.sum()
    del rows, weights
    assert [reference() for reference in held] == [None, None]
    total.backward()
    held = [weakref.ref(group.sent.pop()), weakref.ref(group.received.pop())]
    assert [reference() for reference in held] == [None, None]
