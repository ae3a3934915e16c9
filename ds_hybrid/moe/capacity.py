"""Which (token, expert) pairs an expert with limited capacity works on. Pure functions of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from ds_hybrid.dispatch.routing import count_values

DropPolicy = Literal["probability", "position", "random"]
DROP_POLICIES: tuple[DropPolicy, ...] = ("probability", "position", "random")

_LARGEST_DENOMINATOR = 10**6


@dataclass(frozen=True)
class Capacity:
    """How many pairs of one rank an expert accepts: ``max(ceil(factor * T * K / E), minimum)``, T tokens of this rank.

    A rank counts its own tokens, so ranks with unequal T need not agree on anything.

    Attributes:
        factor, eval_factor: multiples of the even share T * K / E, in training and in evaluation.
        minimum: pairs that are always accepted.
        policy: who stays. "probability": the pairs with the highest score; "position": the first tokens;
            "random": a new draw at every training forward, "position" in evaluation (DeepSpeed's random token
            selection).
    """

    factor: float
    eval_factor: float
    minimum: int
    policy: DropPolicy

    def limit(self, num_tokens: Tensor, *, top_k: int, num_experts: int, training: bool) -> Tensor:
        """Pairs per expert, [] int64. Exact: 10 tokens times 1.1 are 11, not the next integer above 11.000000000000002.

        Args:
            num_tokens: [] int64.
        """
        factor = Fraction(str(self.factor if training else self.eval_factor)).limit_denominator(_LARGEST_DENOMINATOR)
        numerator, denominator = num_tokens * top_k * factor.numerator, num_experts * factor.denominator
        return torch.div(numerator + denominator - 1, denominator, rounding_mode="floor").clamp_min(self.minimum)

    def keeps(
        self, topk_ids: Tensor, scores: Tensor, is_used: Tensor | None, *, num_experts: int, training: bool
    ) -> Tensor:
        """The pairs that are worked on: [T, K] bool.

        Args:
            topk_ids: [T, K] int64.
            scores: [T, K], the router's score of each choice.
            is_used: [T] bool, the tokens that are routed at all; None for all.
        """
        num_tokens = topk_ids.new_tensor(len(topk_ids)) if is_used is None else is_used.sum()
        limit = self.limit(num_tokens, top_k=topk_ids.shape[1], num_experts=num_experts, training=training)
        if is_used is not None:
            topk_ids = topk_ids.masked_fill(~is_used[:, None], num_experts)
        kept = places_in_expert(topk_ids, self._priority(scores, training), num_experts + 1) < limit
        return kept if is_used is None else kept & is_used[:, None]

    def _priority(self, scores: Tensor, training: bool) -> Tensor:
        if self.policy == "probability":
            return scores.detach()
        if self.policy == "random" and training:
            return torch.rand_like(scores)
        return torch.zeros_like(scores)


def places_in_expert(topk_ids: Tensor, priority: Tensor, num_experts: int) -> Tensor:
    """The place of each pair in its expert's queue: highest priority first, equal ones by token, then by choice.

    Args:
        topk_ids: [T, K] int64 below ``num_experts``.
        priority: [T, K].

    Returns:
        [T, K] int64, 0 for the first pair of an expert.
    """
    ids = topk_ids.reshape(-1)
    order = torch.argsort(priority.reshape(-1), stable=True, descending=True)
    order = order[torch.argsort(ids[order], stable=True)]
    counts = count_values(ids, num_experts)
    first = counts.cumsum(0) - counts
    places = torch.empty_like(ids)
    places[order] = torch.arange(len(ids), device=ids.device) - first[ids[order]]
    return places.view_as(topk_ids)
