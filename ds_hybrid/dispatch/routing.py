"""What a router decided, and the plain integer questions that dispatchers ask of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.errors import DispatchError


@dataclass(frozen=True)
class Routing:
    """What the router decided for this rank's T tokens.

    Attributes:
        topk_ids: [T, K] int64, logical experts, 0 <= id < num_experts. The ids of one token differ.
        topk_weights: [T, K] float32 (float64 for float64 tokens), differentiable.
        num_experts: E.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    num_experts: int

    def __post_init__(self) -> None:
        if self.topk_ids.ndim != 2 or self.topk_ids.shape != self.topk_weights.shape:
            raise DispatchError(
                f"topk_ids and topk_weights have shapes {list(self.topk_ids.shape)} and "
                f"{list(self.topk_weights.shape)}, must both be [tokens, top-k]."
            )

    @property
    def num_tokens(self) -> int:
        return self.topk_ids.shape[0]

    @property
    def top_k(self) -> int:
        return self.topk_ids.shape[1]


def ranks_needed(rank_of_choice: Tensor, num_ranks: int) -> Tensor:
    """Which ranks need which token. [T, K] ranks, -1 for none -> [T, P] bool, true where a choice lies on the rank."""
    needed = rank_of_choice.new_zeros((rank_of_choice.shape[0], num_ranks + 1), dtype=torch.bool)
    return needed.scatter_(1, rank_of_choice % (num_ranks + 1), True)[:, :num_ranks]


def count_values(values: Tensor, num_values: int) -> Tensor:
    """How often each of 0..num_values-1 occurs. [...] int64 -> [num_values] int64, without a device-to-host copy."""
    flat = values.reshape(-1)
    return flat.new_zeros(num_values).scatter_add_(0, flat, torch.ones_like(flat))
