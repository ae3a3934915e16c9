"""A one-process dense MoE, and the inputs that dispatchers are compared on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison: ``num_tokens`` has one entry per rank."""

    num_tokens: tuple[int, ...]
    num_experts: int
    top_k: int
    hidden_size: int = 16
    skew: float = 0.0
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)


@dataclass(frozen=True)
class Inputs:
    """Tokens and routing of every rank, and all experts' weights [E, H, H]. Equal on every rank."""

    tokens: list[Tensor]
    topk_ids: list[Tensor]
    topk_weights: list[Tensor]
    expert_weights: Tensor
    upstream: list[Tensor]


def make_inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    popularity = -case.skew * torch.log(torch.arange(1, case.num_experts + 1, dtype=torch.float64))
    weight_dtype = torch.promote_types(case.dtype, torch.float32)
    tokens, ids, weights, upstream = [], [], [], []
    for num in case.num_tokens:
        scores = normal(num, case.num_experts) + popularity
        top = scores.softmax(1).topk(case.top_k, dim=1)
        tokens.append(normal(num, case.hidden_size).to(case.dtype))
        ids.append(top.indices)
        weights.append(top.values.to(weight_dtype))
        upstream.append(normal(num, case.hidden_size).to(case.dtype))
    scale = case.hidden_size**-0.5
    experts = (normal(case.num_experts, case.hidden_size, case.hidden_size) * scale).to(case.dtype)
    return Inputs(tokens, ids, weights, experts, upstream)


def expert(rows: Tensor, weight: Tensor) -> Tensor:
    """A nonlinear expert, so that a weight applied on the wrong side is seen. [R, H] -> [R, H]."""
    return torch.tanh(rows @ weight)


@dataclass(frozen=True)
class Result:
    """What a MoE layer computes: outputs and gradients per rank, and the gradient of all experts' weights."""

    outputs: list[Tensor]
    grad_tokens: list[Tensor]
    grad_topk_weights: list[Tensor]
    grad_experts: Tensor


def dense_reference(inputs: Inputs) -> Result:
    """Every expert on every token, masked by the routing."""
    tokens = [t.clone().requires_grad_() for t in inputs.tokens]
    weights = [w.clone().requires_grad_() for w in inputs.topk_weights]
    experts = inputs.expert_weights.clone().requires_grad_()
    outputs = []
    for t, w, ids in zip(tokens, weights, inputs.topk_ids, strict=True):
        gate = torch.zeros(len(t), len(experts), dtype=w.dtype).scatter(1, ids, w)
        everything = torch.stack([expert(t, e) for e in experts], 1)
        outputs.append((everything * gate[..., None]).sum(1).to(t.dtype))
    loss = sum((o * u).sum() for o, u in zip(outputs, inputs.upstream, strict=True))
    grads = torch.autograd.grad(loss, [*tokens, *weights, experts])  # type: ignore[arg-type]
    num = len(tokens)
    return Result([o.detach() for o in outputs], list(grads[:num]), list(grads[num:-1]), grads[-1])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value; infinite when the actual values are not all finite."""
    if not actual.isfinite().all():
        return float("inf")
    if not expected.numel():
        return 0.0 if actual.shape == expected.shape else float("inf")
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))
