"""Grouped products over sorted rows equal one product per expert, forward and backward, whatever the group sizes."""

from __future__ import annotations

import pytest
import torch
from deepspeed.moe.ep_experts import GroupedExperts
from torch import Tensor

from ds_hybrid.moe.experts import run_experts

HIDDEN, WIDTH = 16, 24


@pytest.fixture
def experts() -> GroupedExperts:
    torch.manual_seed(0)
    experts = GroupedExperts(HIDDEN, WIDTH, num_experts=4)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts


@pytest.mark.parametrize("counts", [[3, 5, 1, 7], [0, 9, 0, 2], [0, 0, 0, 4], [0, 0, 0, 0]])
def test_equals_one_product_per_expert(experts: GroupedExperts, counts: list[int]) -> None:
    rows = torch.randn(sum(counts), HIDDEN).requires_grad_()
    upstream = torch.randn(sum(counts), HIDDEN)
    actual = run_experts(experts, rows, torch.tensor(counts))
    expected = one_by_one(experts, rows, counts)
    torch.testing.assert_close(actual, expected)

    inputs = [rows, *experts.parameters()]
    actual_grads = torch.autograd.grad(actual, inputs, upstream)
    expected_grads = torch.autograd.grad(expected, inputs, upstream)
    for got, wanted in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def one_by_one(experts: GroupedExperts, rows: Tensor, counts: list[int]) -> Tensor:
    outputs = []
    for slot, part in enumerate(rows.split(counts)):
        gate, up = part @ experts.w1[slot].T, part @ experts.w3[slot].T
        outputs.append((torch.nn.functional.silu(gate) * up) @ experts.w2[slot].T)
    return torch.cat(outputs)
