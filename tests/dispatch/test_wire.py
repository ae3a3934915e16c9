"""Rows and weights come off the wire bit for bit, and their gradients with them; no NaN is seen where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.wire import exchange_weighted_rows


class Loopback(RankGroup):
    """Two ranks of which the other is this one: what is sent arrives, and is kept."""

    def __init__(self) -> None:
        self.size, self.rank, self.meter = 2, 0, Meter()
        self.sent: list[torch.Tensor] = []

    def _all_to_all(self, rows: torch.Tensor, *_: Any) -> torch.Tensor:
        self.sent.append(rows)
        return rows.clone()


@pytest.mark.parametrize("num_rows", [0, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_round_trip_is_exact(dtype: torch.dtype, num_rows: int) -> None:
    group = Loopback()
    rows = torch.randn(num_rows, 6).to(dtype).requires_grad_()
    weights = torch.rand(num_rows, 3).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    counts = [num_rows - 1, 1] if num_rows else [0, 0]
    got_rows, got_weights = exchange_weighted_rows(rows, weights, group, counts, counts)
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
        got_rows, got_weights = exchange_weighted_rows(rows, weights, Loopback(), [1, 0], [1, 0])
        torch.autograd.backward([got_rows, got_weights], [torch.ones_like(got_rows), weights.detach().clone()])
    assert weights.grad is not None
    assert torch.equal(weights.grad, weights)
