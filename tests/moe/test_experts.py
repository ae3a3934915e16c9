"""Grouped experts equal one expert at a time: sums, and gradients of tokens, weights and parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from deepspeed.moe.ep_experts import GroupedExperts
from torch import Tensor

from ds_hybrid.dispatch.arrived import Arrived
from ds_hybrid.dispatch.rows import group_by_slot
from ds_hybrid.moe.experts import HybridExperts
from ds_hybrid.moe.weighted_experts import Activation, align_groups, weighted_experts

HIDDEN, WIDTH, SLOTS = 16, 24, 4


def experts_of(dtype: torch.dtype = torch.float32, **options: object) -> HybridExperts:
    torch.manual_seed(0)
    experts = HybridExperts.adopt(GroupedExperts(HIDDEN, WIDTH, num_experts=SLOTS, **options).to(dtype))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts


@dataclass(frozen=True)
class Case:
    """``slots`` [N, M]: the local slot of each choice, -1 for none."""

    slots: list[list[int]]

    def arrived(self, dtype: torch.dtype = torch.float32, *, weighted: bool = True) -> Arrived:
        torch.manual_seed(1)
        slots = torch.tensor(self.slots, dtype=torch.int64).reshape(
            len(self.slots), len(self.slots[0]) if self.slots else 2
        )
        pairs, counts = group_by_slot(slots, SLOTS, int((slots >= 0).sum()))
        tokens = torch.randn(len(slots), HIDDEN, dtype=dtype).requires_grad_()
        weights = torch.rand(slots.shape, dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()
        return Arrived(tokens, pairs, counts, weights if weighted else None)


CASES = {
    "several experts a token": Case([[0, 2, 3], [2, -1, 1], [-1, 2, -1], [3, 0, 2], [1, 3, 0]]),
    "a token without expert, an expert without token": Case([[0, -1], [-1, -1], [2, 0]]),
    "one row per token": Case([[3], [0], [3], [1], [0]]),
    "no token": Case([]),
}


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_expert_at_a_time(name: str, weighted: bool, alignment: int) -> None:
    experts, arrived = experts_of(), CASES[name].arrived(weighted=weighted)
    groups = align_groups(arrived.pairs, arrived.num_rows_per_slot, alignment)
    actual = weighted_experts(
        arrived.tokens,
        arrived.weights,
        (experts.w1, experts.w2, experts.w3),
        groups,
        Activation("swiglu", 1.0, 1.0),
    )
    compare(actual, arrived, experts)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_grouped_mm": False}, {"gate_up_impl": "fused"}],
    ids=["grouped", "loop", "fused gate and up"],
)
@pytest.mark.parametrize("name", CASES)
def test_every_way_of_deepspeed_to_run_them(name: str, options: dict[str, object]) -> None:
    experts, arrived = experts_of(**options), CASES[name].arrived()
    compare(experts.run(arrived), arrived, experts)


@pytest.mark.parametrize("activation", ["geglu_tanh", "swiglu_clamped", "swiglu_oai"])
def test_other_activations_as_deepspeed_computes_them(activation: str) -> None:
    experts = experts_of(activation=activation, activation_limit=0.5)
    arrived = CASES["several experts a token"].arrived()
    expected = arrived.add(GroupedExperts.forward(experts, arrived.rows(), arrived.num_rows_per_slot))
    compare_with(expected, experts.run(arrived), arrived, experts)


@pytest.mark.parametrize("frozen", ["w1", "w2", "w3", "tokens", "weights"])
def test_what_is_frozen_gets_no_gradient_and_the_others_theirs(frozen: str) -> None:
    experts, arrived = experts_of(), CASES["several experts a token"].arrived()
    inputs = {"tokens": arrived.tokens, "weights": arrived.weights, **dict(experts.named_parameters())}
    inputs[frozen].requires_grad_(False)
    compare(experts.run(arrived), arrived, experts)
    experts.run(arrived).sum().backward()
    assert [name for name, tensor in inputs.items() if tensor.grad is None] == [frozen]


def test_bfloat16_weighs_in_float32_and_rounds_once() -> None:
    """Bit for bit: every hidden value is 3, and an expert's output its first hidden value."""
    experts, arrived = experts_of(torch.bfloat16), random_case(0).arrived(torch.bfloat16)
    with torch.no_grad():
        arrived.tokens.fill_(1.0)
        experts.w1.fill_(64 / HIDDEN)  # silu(64) is 64
        experts.w3.fill_(3 / 64 / HIDDEN)
        experts.w2.zero_()[:, :, 0] = 1.0
    actual = experts.run(arrived)
    weights = arrived.weights

    def expected(weighed: Tensor) -> Tensor:
        return weighed.bfloat16().float().sum(1, keepdim=True).bfloat16().expand_as(actual)

    assert torch.equal(actual, expected(3 * weights))
    assert not torch.equal(actual, expected(3 * weights.bfloat16().float()))
    actual.sum().backward()
    assert torch.equal(weights.grad, torch.full_like(weights, 3.0 * HIDDEN))


@pytest.mark.parametrize("seed", range(3))
def test_weighing_hidden_values_in_bfloat16_costs_little(seed: int) -> None:
    """Their error against float64, beside that of outputs weighed in float32: 1.04 to 1.09 times as much."""
    experts, arrived = experts_of(torch.bfloat16), random_case(seed).arrived(torch.bfloat16)
    exact = one_by_one(experts.double(), arrived)
    actual = experts.bfloat16().run(arrived)
    outputs_weighed = arrived.add(GroupedExperts.forward(experts, arrived.rows(), arrived.num_rows_per_slot))
    weights_rounded = experts.run(replace(arrived, weights=arrived.weights.bfloat16().float()))
    assert not torch.equal(actual, weights_rounded)
    assert rms_error(actual, exact) <= 1.6 * rms_error(outputs_weighed, exact)
    assert rms_error(actual, exact) < rms_error(weights_rounded, exact)


def random_case(seed: int) -> Case:
    """256 tokens with three experts each."""
    chances = torch.rand(256, SLOTS, generator=torch.Generator().manual_seed(seed))
    return Case(chances.argsort(1)[:, :3].tolist())


def rms_error(actual: Tensor, exact: Tensor) -> float:
    """Relative root mean square error."""
    return ((actual.double() - exact).square().mean() / exact.square().mean()).sqrt().item()


def test_float32_parameters_meet_bfloat16_tokens() -> None:
    """As under autocast: computed in the dtype of the tokens, gradients in that of the parameters."""
    experts, arrived = experts_of(torch.float32), CASES["several experts a token"].arrived(torch.bfloat16)
    experts.run(arrived).sum().backward()
    assert {parameter.grad.dtype for parameter in experts.parameters()} == {torch.float32}


def test_backward_keeps_tokens_once_with_gate_and_up() -> None:
    """Bytes: nothing of rows x hidden size, one table of tokens x hidden size."""
    experts, arrived = experts_of(), CASES["several experts a token"].arrived()
    kept = [tensor for tensor in experts.run(arrived).grad_fn.saved_tensors if tensor is not None]
    of_experts = {parameter.data_ptr() for parameter in experts.parameters()}
    floating = [tensor for tensor in kept if tensor.is_floating_point() and tensor.data_ptr() not in of_experts]
    num_rows, num_tokens = len(arrived.pairs.cell_of_row), len(arrived.tokens)
    assert sorted(tensor.numel() for tensor in floating) == sorted(
        [num_tokens * HIDDEN, arrived.weights.numel(), num_rows * WIDTH, num_rows * WIDTH]
    )


def test_filling_reaches_no_result_even_where_it_would_overflow() -> None:
    experts, arrived = experts_of(torch.float32), CASES["several experts a token"].arrived(torch.float32)
    with torch.no_grad():
        arrived.tokens[0] = 1e30  # the token that a careless filling would repeat for every expert
    groups = align_groups(arrived.pairs, arrived.num_rows_per_slot, 8)
    parameters = (experts.w1, experts.w2, experts.w3)
    output = weighted_experts(arrived.tokens, arrived.weights, parameters, groups, Activation("swiglu", 1.0, 1.0))
    output[1:].sum().backward()
    assert not experts.w2.grad[[0, 2, 3]].isfinite().all()  # the experts that token 0 chose
    assert experts.w2.grad[1].isfinite().all()


def compare(actual: Tensor, arrived: Arrived, experts: HybridExperts) -> None:
    compare_with(one_by_one(experts, arrived), actual, arrived, experts)


def compare_with(expected: Tensor, actual: Tensor, arrived: Arrived, experts: HybridExperts) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    candidates = [arrived.tokens, *([] if arrived.weights is None else [arrived.weights]), *experts.parameters()]
    inputs = [tensor for tensor in candidates if tensor.requires_grad]
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, upstream, allow_unused=True)
    got = torch.autograd.grad(actual, inputs, upstream)
    for gradient, reference, tensor in zip(got, wanted, inputs, strict=True):
        reference = torch.zeros_like(tensor) if reference is None else reference
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


def one_by_one(experts: GroupedExperts, arrived: Arrived) -> Tensor:
    """Token by token, choice by choice."""
    num_copies = arrived.pairs.num_copies
    slot_of_row = torch.arange(SLOTS).repeat_interleave(arrived.num_rows_per_slot)
    sums = [token * 0 for token in arrived.tokens]
    for cell, slot in zip(arrived.pairs.cell_of_row.tolist(), slot_of_row.tolist(), strict=True):
        token, copy = divmod(cell, num_copies)
        values = arrived.tokens[token].to(experts.w1.dtype)
        gate, up = values @ experts.w1[slot].T, values @ experts.w3[slot].T
        output = (torch.nn.functional.silu(gate) * up) @ experts.w2[slot].T
        sums[token] = sums[token] + (output if arrived.weights is None else output * arrived.weights[token, copy])
    return torch.stack(sums) if sums else arrived.tokens * experts.w1.sum() * 0
