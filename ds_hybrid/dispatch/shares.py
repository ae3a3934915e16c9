"""Ranks of a tensor-parallel group hold the same tokens: each takes a share through the experts, then all join them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.routing import Routing


class TokenShares:
    """The T tokens that every rank of a group holds, cut into one share of neighbours for each rank.

    What follows the joined output is computed alike on every rank, from one loss that all of them have. So the gradient
    of a share is that part of the output's gradient, and the gradient of the tokens is joined from all shares.

    Args:
        group: ranks with the same tokens. A group of one takes all of them and exchanges nothing.
        num_tokens: T.
    """

    def __init__(self, group: RankGroup, num_tokens: int) -> None:
        self._group = group
        self._num_tokens = num_tokens
        self._longest = -(-num_tokens // group.size)
        first = min(group.rank * self._longest, num_tokens)
        self._own = slice(first, min(first + self._longest, num_tokens))

    def part(self, values: Tensor) -> Tensor:
        """The part of values [T, ...] that is of this rank's share; nothing comes back to the other ranks' parts."""
        return values[self._own]

    def of_routing(self, routing: Routing) -> Routing:
        """What the router decided for this rank's share."""
        return Routing(self.part(routing.topk_ids), self.take(routing.topk_weights), routing.num_experts)

    def take(self, values: Tensor) -> Tensor:
        """[T, C], the same on every rank -> this rank's share [S, C]."""
        return values if self._group.size == 1 else _Take.apply(values, self)

    def join(self, share: Tensor) -> Tensor:
        """This rank's share [S, C] -> [T, C], the same on every rank."""
        return share if self._group.size == 1 else _Join.apply(share, self)

    def _whole(self, share: Tensor) -> Tensor:
        padded = pad(share, (0, 0, 0, self._longest - len(share)))
        return self._group.all_gather(padded).wait()[: self._num_tokens]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shares: TokenShares) -> Tensor:
        ctx.shares = shares
        return shares.part(values).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.shares._whole(gradient), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, shares: TokenShares) -> Tensor:
        ctx.shares = shares
        return shares._whole(share)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.shares.part(gradient).clone(), None
