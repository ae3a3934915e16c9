"""The router: which experts a token goes to, with which weights, and what the choice costs.

Scores, weights and losses are computed in float32 (float64 for float64 tokens), under autocast too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ds_hybrid.dispatch.routing import Routing, count_values
from ds_hybrid.dispatch.spans import is_in_backward
from ds_hybrid.moe.balance import load_balancing_loss, z_loss
from ds_hybrid.moe.capacity import Capacity

ScoreFunction = Literal["softmax", "sigmoid"]
SCORE_FUNCTIONS: tuple[ScoreFunction, ...] = ("softmax", "sigmoid")
Noise = Literal["none", "jitter", "gumbel", "gumbel_second"]

_JITTER = 1e-2


@dataclass(frozen=True)
class RouterOptions:
    """How a router scores, chooses and weighs experts.

    Attributes:
        top_k: experts per token, K.
        score: "softmax" over experts, or a "sigmoid" for each.
        normalize: divide a token's weights by their sum over the choices that are kept.
        weight_scale: factor on every weight, after normalising.
        num_groups, topk_groups: experts are cut into ``num_groups`` equal runs and a token may only choose in its
            ``topk_groups`` best. A run's score is its best expert's for softmax (DeepSeek-V2, arXiv 2405.04434) and the
            sum of its best two for sigmoid (DeepSeek-V3, arXiv 2412.19437).
        noise: in training only. "jitter": the router's input times U(0.99, 1.01) (Switch, arXiv 2101.03961);
            "gumbel": the experts are sampled; "gumbel_second": the first is the best and the second is sampled (GShard,
            arXiv 2006.16668).
        capacity: what an expert accepts; None for everything.
        z_loss_weight: weight of the z-loss relative to the load-balancing loss.
        bias_update_rate: step of the correction bias; 0 for no bias.
    """

    top_k: int
    score: ScoreFunction = "softmax"
    normalize: bool = False
    weight_scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    noise: Noise = "none"
    capacity: Capacity | None = None
    z_loss_weight: float = 0.0
    bias_update_rate: float = 0.0


@dataclass(frozen=True)
class RouterOutput:
    """A router's decision for this rank's T tokens.

    Attributes:
        routing: ids and weights of every token, those that are not kept included; their weights are 0.
        kept: [T, K] bool, the pairs to work on; None for all.
        loss: [] float32, the load-balancing loss plus the weighted z-loss; 0 without tokens.
        num_routed: [E] int64, pairs that chose each expert, before anything is dropped.
        num_processed: [E] int64, pairs that each expert works on.
    """

    routing: Routing
    kept: Tensor | None
    loss: Tensor
    num_routed: Tensor
    num_processed: Tensor


class Router(nn.Module):
    """A linear gate without bias, and the rules of :class:`RouterOptions`.

    Attributes:
        wg: the gate; ``wg.weight`` is [E, H], DeepSpeed's name for it.
        correction_bias: [E] float32, added to the scores for choosing only (DeepSeek-V3); None when it is off.
        load_since_update: [E] int64, pairs routed in training since the bias was last updated.
    """

    correction_bias: Tensor | None
    load_since_update: Tensor | None

    def __init__(self, hidden_size: int, num_experts: int, options: RouterOptions) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.options = options
        self.wg = nn.Linear(hidden_size, num_experts, bias=False)
        has_bias = options.bias_update_rate > 0
        # No "expert" in these names: DeepSpeed would save them as if they belonged to an expert.
        self.register_buffer("correction_bias", torch.zeros(num_experts) if has_bias else None)
        load = torch.zeros(num_experts, dtype=torch.int64) if has_bias else None
        self.register_buffer("load_since_update", load, persistent=False)

    def forward(self, tokens: Tensor, is_used: Tensor | None = None) -> RouterOutput:
        """tokens [T, H], is_used [T] bool or None for all -> what to do with them."""
        options, num_experts = self.options, self.num_experts
        with torch.autocast(tokens.device.type, enabled=False):
            logits = self._logits(tokens)
            scores = logits.softmax(1) if options.score == "softmax" else logits.sigmoid()
            topk_ids = self._choose(logits.detach(), scores.detach())
            topk_scores = scores.gather(1, topk_ids)

            kept = None if is_used is None else is_used[:, None].expand_as(topk_ids)
            num_routed = count_pairs(topk_ids, kept, num_experts)
            num_processed = num_routed
            if self.load_since_update is not None and self.training and not is_in_backward():
                self.load_since_update += num_routed
            if options.capacity is not None:
                kept = options.capacity.keeps(
                    topk_ids, topk_scores, is_used, num_experts=num_experts, training=self.training
                )
                num_processed = count_pairs(topk_ids, kept, num_experts)

            weights = topk_scores if kept is None else topk_scores * kept
            if options.normalize:
                weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).eps)
            probabilities = scores if options.score == "softmax" else scores / scores.sum(1, keepdim=True)
            loss = load_balancing_loss(probabilities, num_routed, is_used)
            if options.z_loss_weight:
                loss = loss + options.z_loss_weight * z_loss(logits, is_used)
        routing = Routing(topk_ids, weights * options.weight_scale, num_experts)
        return RouterOutput(routing, kept, loss, num_routed, num_processed)

    def restore_bias_dtype(self) -> None:
        """Make the bias float32 again after a cast of the whole model: 16 bits would swallow its small steps."""
        if self.correction_bias is not None:
            self.correction_bias = self.correction_bias.float()

    def _logits(self, tokens: Tensor) -> Tensor:
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        tokens = tokens.to(dtype)
        if self.training and self.options.noise == "jitter":
            tokens = tokens * torch.empty_like(tokens).uniform_(1 - _JITTER, 1 + _JITTER)
        return nn.functional.linear(tokens, self.wg.weight.to(dtype))

    def _choose(self, logits: Tensor, scores: Tensor) -> Tensor:
        options = self.options
        if self.training and options.noise in ("gumbel", "gumbel_second"):
            sampled = logits - torch.empty_like(logits).exponential_().log()
            if options.noise == "gumbel_second":
                sampled = sampled.scatter(1, scores.argmax(1, keepdim=True), torch.inf)
            scores = sampled
        if self.correction_bias is not None:
            scores = scores + self.correction_bias
        if options.num_groups > 1:
            best = 1 if options.score == "softmax" else 2
            scores = limit_to_groups(scores, options.num_groups, options.topk_groups, best=best)
        return scores.topk(options.top_k, dim=1).indices


def limit_to_groups(scores: Tensor, num_groups: int, topk_groups: int, *, best: int) -> Tensor:
    """-inf for the experts outside each token's ``topk_groups`` groups with the largest sum of ``best`` scores.

    scores [T, E] -> [T, E]; group g holds experts g * E / num_groups and so on.
    """
    grouped = scores.unflatten(1, (num_groups, -1))
    group_scores = grouped.topk(min(best, grouped.shape[2]), dim=2).values.sum(2)
    chosen = torch.zeros_like(group_scores, dtype=torch.bool)
    chosen.scatter_(1, group_scores.topk(topk_groups, dim=1).indices, True)
    return grouped.masked_fill(~chosen[..., None], -torch.inf).flatten(1)


def count_pairs(topk_ids: Tensor, kept: Tensor | None, num_experts: int) -> Tensor:
    """How many of the kept pairs chose each expert. [T, K] -> [E] int64."""
    if kept is None:
        return count_values(topk_ids, num_experts)
    return count_values(topk_ids.masked_fill(~kept, num_experts), num_experts + 1)[:num_experts]
