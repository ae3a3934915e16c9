"""What is benchmarked: shapes, routings, and the tokens, weights and gradients that every method is given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

RoutingKind = Literal["uniform", "zipf"]
ROUTINGS: tuple[RoutingKind, ...] = get_args(RoutingKind)
ZIPF_EXPONENT = 1.2
NOISE = math.pi / math.sqrt(6)
"""Standard deviation of the logits' random part: a Gumbel variable's, so that top-k draws about as by the prior."""


@dataclass(frozen=True)
class Shape:
    """E experts of width F, of which each token of H values takes K."""

    num_experts: int
    top_k: int
    hidden_size: int
    expert_width: int

    def __str__(self) -> str:
        return f"E{self.num_experts} k{self.top_k} H{self.hidden_size} F{self.expert_width}"


SHAPES: dict[str, Shape] = {
    "E16k2": Shape(16, 2, 512, 512),
    "E32k4": Shape(32, 4, 512, 512),
    "E64k8": Shape(64, 8, 256, 128),
    "E128k8": Shape(128, 8, 1024, 256),
    "tiny": Shape(8, 2, 16, 16),
}
DEFAULT_SHAPES = ("E16k2", "E32k4", "E64k8")


@dataclass(frozen=True)
class Case:
    """One comparison. ``num_tokens`` is per rank."""

    shape: Shape
    ep_size: int
    routing: RoutingKind
    num_tokens: int
    seed: int = 0

    def __str__(self) -> str:
        routing = self.routing if self.routing == "uniform" else f"Zipf {ZIPF_EXPONENT}"
        return f"{self.shape}, EP {self.ep_size}, {routing}, {self.num_tokens} tokens a rank"


@dataclass(frozen=True)
class Batch:
    """Tokens and upstream gradient of one rank, both [T, H]."""

    tokens: Tensor
    upstream: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        return Batch(self.tokens.to(device, dtype), self.upstream.to(device, dtype))


@dataclass(frozen=True)
class Expected:
    """What a layer must return for a :class:`Batch`: output and gradient of the tokens [T, H], and what it routed to.

    ``topk_ids`` is [T, K].
    """

    output: Tensor
    grad_tokens: Tensor
    topk_ids: Tensor


def make_batch(case: Case, rank: int) -> Batch:
    """Of float32 on the CPU. Under Zipf one feature is 1, for the gate to read the prior from."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank + 1)
    tokens = torch.randn(case.num_tokens, case.shape.hidden_size, generator=generator)
    upstream = torch.randn(case.num_tokens, case.shape.hidden_size, generator=generator)
    if case.routing == "zipf":
        tokens[:, 0] = 1
    return Batch(tokens, upstream)


def gate_weight(case: Case) -> Tensor:
    """[E, H]: random logits, under Zipf on top of log(1 / place ** 1.2), the experts in random order."""
    shape = case.shape
    generator = torch.Generator().manual_seed(1000 * case.seed)
    weight = torch.randn(shape.num_experts, shape.hidden_size, generator=generator) * NOISE / shape.hidden_size**0.5
    if case.routing == "zipf":
        place = torch.randperm(shape.num_experts, generator=generator) + 1
        weight[:, 0] = -ZIPF_EXPONENT * place.log()
    return weight


def expert_weights(case: Case, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """w1 [F, H], w3 [F, H] and w2 [H, F] of one SwiGLU expert; each rank makes only those that it needs."""
    hidden_size, width = case.shape.hidden_size, case.shape.expert_width
    generator = torch.Generator().manual_seed(1_000_000 * (case.seed + 1) + expert)
    w1, w3 = torch.randn(2, width, hidden_size, generator=generator) / hidden_size**0.5
    return w1, w3, torch.randn(hidden_size, width, generator=generator) / width**0.5


def swiglu(rows: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """[R, H] -> [R, H]."""
    return linear(silu(linear(rows, w1)) * linear(rows, w3), w2)


def normalizes(shape: Shape) -> bool:
    """Whether the weights of a token's K experts are scaled to sum 1: DeepSpeed's MoE does that for all K but 1."""
    return shape.top_k > 1


@cache
def expect(case: Case, rank: int) -> Expected:
    """Every token through its experts, in this process, in float32, expert after expert."""
    batch = make_batch(case, rank)
    tokens = batch.tokens.clone().requires_grad_()
    weights, ids = linear(tokens, gate_weight(case)).softmax(1).topk(case.shape.top_k, dim=1)
    if normalizes(case.shape):
        weights = weights / weights.sum(1, keepdim=True)
    output = torch.zeros_like(batch.tokens)
    for expert in range(case.shape.num_experts):
        token, choice = (ids == expert).nonzero().unbind(1)
        rows = swiglu(tokens[token], *expert_weights(case, expert))
        output = output.index_add(0, token, rows * weights[token, choice, None])
    output.backward(batch.upstream)
    assert tokens.grad is not None
    return Expected(output.detach(), tokens.grad, ids)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value."""
    actual, expected = actual.detach().cpu().double(), expected.double()
    return float((actual - expected).abs().max() / expected.abs().max())


def rows_that_must_cross(case: Case, topk_ids: Tensor, rank: int) -> int:
    """Pairs of a token of this rank and another rank that holds one of its experts. [T, K] ids -> a count."""
    ranks = topk_ids // (case.shape.num_experts // case.ep_size)
    needed = torch.zeros(len(ranks), case.ep_size, dtype=torch.bool).scatter_(1, ranks, True)
    needed[:, rank % case.ep_size] = False
    return int(needed.sum())
