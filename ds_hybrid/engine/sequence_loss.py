"""The loss of a rank's shard, such that its mean over ranks, which DeepSpeed takes, is that of the whole sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from ds_hybrid.engine.sequence_batches import IGNORED
from ds_hybrid.engine.sequence_groups import SequenceGroups
from ds_hybrid.errors import ConfigError


def token_loss(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Cross entropy of the shard's tokens, summed and divided by ``num_items_in_batch``. [B, Ls, V] -> [] float32.

    Raises:
        ConfigError: the batch is not one of ``SequenceBatches``, or had no labels.
    """
    missing = [key for key in ("shift_labels", "num_items_in_batch") if key not in batch]
    if missing:
        raise ConfigError(
            f"the loss of a shard: the batch has no {' and no '.join(missing)}. Give the batches labels, and read them "
            "through engine.sequence_parallel.batches."
        )
    labels = batch["shift_labels"].flatten()
    total = cross_entropy(logits.float().flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return total / batch["num_items_in_batch"]


def balance_loss(
    router_logits: Sequence[Tensor], attention_mask: Tensor | None, groups: SequenceGroups, *, top_k: int
) -> Tensor:
    """The loss that keeps experts evenly busy over whole sequences, as a value whose mean over the ranks it is.

    What transformers computes of unsharded router logits: E * sum over e of (share of tokens that chose e) * (mean
    probability of e), over the tokens of all layers. Shares and the number of tokens are those of all ranks of the
    group, so that the mean over ranks is the loss of the whole. The mean of losses that each rank had by itself would
    ask for evenness within each shard too.

    Args:
        router_logits: of each layer [T, E], the T = B * Ls tokens of this rank.
        attention_mask: [B, Ls], 0 at padding, which does not count; None: no padding.
        top_k: experts of a token.

    Returns:
        [] float32. Collective over the group.
    """
    num_experts = router_logits[0].shape[-1]
    is_real = torch.ones(len(router_logits[0]), device=router_logits[0].device)
    if attention_mask is not None:
        is_real = attention_mask.flatten().to(is_real)
    chosen = torch.zeros(num_experts, device=is_real.device)
    probability = torch.zeros(num_experts, device=is_real.device)
    for logits in router_logits:
        probabilities = logits.float().softmax(-1)
        experts = probabilities.topk(top_k, -1).indices
        chosen = chosen.scatter_add(0, experts.flatten(), is_real.repeat_interleave(top_k))
        probability = probability + (probabilities * is_real[:, None]).sum(0)
    totals = torch.cat([chosen, (len(router_logits) * is_real.sum())[None]])
    dist.all_reduce(totals, group=groups.group)
    num_tokens = totals[-1].clamp_min(1)
    return groups.size * num_experts * (totals[:-1] / num_tokens * probability / num_tokens).sum()
