"""The losses against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from ds_hybrid.moe.balance import load_balancing_loss, z_loss


@pytest.mark.parametrize(
    ("num_routed", "probabilities", "expected"),
    [
        ([3, 3, 3, 3], [0.25, 0.25, 0.25, 0.25], 1.0),
        ([12, 0, 0, 0], [1.0, 0.0, 0.0, 0.0], 4.0),
        ([6, 6, 0, 0], [0.5, 0.25, 0.25, 0.0], 4 * (0.5 * 0.5 + 0.5 * 0.25)),
        ([0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25], 0.0),
    ],
)
def test_load_balancing_loss(num_routed: list[int], probabilities: list[float], expected: float) -> None:
    rows = torch.tensor(probabilities).expand(6, 4)
    assert float(load_balancing_loss(rows, torch.tensor(num_routed), None)) == pytest.approx(expected)


def test_masked_tokens_do_not_count() -> None:
    logits = torch.tensor([[0.0, 0.0], [50.0, -50.0]])
    is_used = torch.tensor([True, False])
    assert float(load_balancing_loss(logits.softmax(1), torch.tensor([1, 0]), is_used)) == pytest.approx(1.0)
    assert float(z_loss(logits, is_used)) == pytest.approx(math.log(2) ** 2)
    assert float(z_loss(logits, torch.tensor([False, False]))) == 0.0
