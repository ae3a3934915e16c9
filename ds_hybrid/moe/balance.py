"""The losses that keep experts evenly loaded and logits small. Pure functions of tensors."""

from __future__ import annotations

from torch import Tensor


def load_balancing_loss(probabilities: Tensor, num_routed: Tensor, is_used: Tensor | None) -> Tensor:
    """E * sum over e of (share of the pairs that chose e) * (mean probability of e): 1 when even, at most E.

    Switch Transformer (arXiv 2101.03961, equation 4), with GShard's counts over all k choices. It is the loss of one
    rank's micro-batch; DeepSpeed averages its gradient over micro-batches and ranks.

    Args:
        probabilities: [T, E], each row sums to 1.
        num_routed: [E] int64.
        is_used: [T] bool, the tokens that count; None for all.

    Returns:
        [] in the dtype of ``probabilities``; 0 without tokens.
    """
    share = num_routed.to(probabilities.dtype) / num_routed.sum().clamp_min(1)
    return len(num_routed) * (share * _mean_over_tokens(probabilities, is_used)).sum()


def z_loss(logits: Tensor, is_used: Tensor | None) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2, which keeps logits small (ST-MoE, arXiv 2202.08906, equation 5).

    logits [T, E] -> []; 0 without tokens.
    """
    return _mean_over_tokens(logits.logsumexp(1, keepdim=True).square(), is_used).sum()


def _mean_over_tokens(values: Tensor, is_used: Tensor | None) -> Tensor:
    """[T, C] -> [C]."""
    if is_used is None:
        return values.sum(0) / max(len(values), 1)
    return values.masked_fill(~is_used[:, None], 0).sum(0) / is_used.sum().clamp_min(1)
