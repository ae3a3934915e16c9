"""A MoE layer written token by token, to compare ``ds_hybrid.MoE`` with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.moe.router import RouterOptions

Expert = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Reference:
    """What the layer should give; counts are lists of E integers."""

    output: Tensor
    l_aux: Tensor
    num_routed: list[int]
    num_processed: list[int]


def dense_moe(
    tokens: Tensor,
    gate: Tensor,
    experts: Sequence[Expert],
    options: RouterOptions,
    used: Sequence[bool] | None = None,
    bias: Tensor | None = None,
    training: bool = True,
) -> Reference:
    """One rank's tokens [T, H] through all experts; ``gate`` is [E, H]."""
    num_experts = len(experts)
    used = [True] * len(tokens) if used is None else used
    logits = tokens @ gate.T
    scores = logits.softmax(1) if options.score == "softmax" else torch.sigmoid(logits)
    chosen = {t: _choose(scores[t], options, bias) for t in range(len(tokens)) if used[t]}
    kept = _within_capacity(chosen, scores, num_experts, options, training)

    output = []
    for t, token in enumerate(tokens):
        choices = [e for e in chosen.get(t, []) if (t, e) in kept]
        total = sum((scores[t, e] for e in choices), start=scores.new_zeros(())) if options.normalize else 1.0
        row = token * 0
        for e in choices:
            row = row + options.weight_scale * scores[t, e] / total * experts[e](token[None])[0]
        output.append(row)

    num_routed = [sum(e in choices for choices in chosen.values()) for e in range(num_experts)]
    num_processed = [sum(kept_e == e for _, kept_e in kept) for e in range(num_experts)]
    l_aux = tokens.sum() * 0 + gate.sum() * 0
    num_used = max(len(chosen), 1)
    for t in chosen:
        probabilities = scores[t] / scores[t].sum()
        share = torch.tensor(num_routed, dtype=tokens.dtype) / (num_used * options.top_k)
        l_aux = l_aux + num_experts * (share * probabilities).sum() / num_used
        l_aux = l_aux + options.z_loss_weight * logits[t].exp().sum().log() ** 2 / num_used
    return Reference(torch.stack(output) if output else tokens, l_aux, num_routed, num_processed)


def _choose(scores: Tensor, options: RouterOptions, bias: Tensor | None) -> list[int]:
    values = (scores if bias is None else scores + bias).tolist()
    size = len(values) // options.num_groups
    best = 1 if options.score == "softmax" else 2
    groups = [list(range(g * size, (g + 1) * size)) for g in range(options.num_groups)]
    groups.sort(key=lambda group: -sum(sorted((values[e] for e in group), reverse=True)[:best]))
    allowed = [e for group in groups[: options.topk_groups] for e in group]
    return sorted(allowed, key=lambda e: -values[e])[: options.top_k]


def _within_capacity(
    chosen: dict[int, list[int]], scores: Tensor, num_experts: int, options: RouterOptions, training: bool
) -> set[tuple[int, int]]:
    pairs = [(t, e) for t, choices in chosen.items() for e in choices]
    if options.capacity is None:
        return set(pairs)
    factor = options.capacity.factor if training else options.capacity.eval_factor
    limit = max(math.ceil(round(factor * len(pairs) / num_experts, 9)), options.capacity.minimum)
    kept = set()
    for expert in range(num_experts):
        queue = [(t, e) for t, e in pairs if e == expert]
        if options.capacity.policy == "probability":
            queue.sort(key=lambda pair: -scores[pair].item())
        kept |= set(queue[:limit])
    return kept
