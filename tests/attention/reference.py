"""Full attention on one process, and the cases that are compared with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ds_hybrid.attention.masks import PADDING, MaskRule, Sight
from ds_hybrid.attention.shards import Order, Shards

Documents = Literal["one", "packed", "padded"]


@dataclass(frozen=True)
class Case:
    num_tokens: int
    causal: bool = True
    window: int | None = None
    documents: Documents = "one"
    order: Order = "balanced"
    batch_size: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 16
    value_head_dim: int = 16

    @property
    def rule(self) -> MaskRule:
        return MaskRule(self.causal, self.window)

    def shards(self, num_ranks: int) -> Shards:
        return Shards(self.num_tokens, num_ranks, self.order)

    def sight(self, num_ranks: int, rank: int) -> Sight:
        return Sight(self.shards(num_ranks), rank, self.rule, documents(self))


@dataclass(frozen=True)
class Tensors:
    """[B, heads, tokens, dim], of a whole sequence or of a shard."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor

    def padded(self, length: int) -> Tensors:
        """With noise after the end, which nobody may see."""
        return self._each(
            lambda x: torch.cat([x, torch.full((*x.shape[:2], length - x.shape[2], x.shape[3]), 7.0, dtype=x.dtype)], 2)
        )

    def shard(self, shards: Shards, rank: int) -> Tensors:
        return self._each(lambda x: shards.shard(x.transpose(1, 2), rank).transpose(1, 2).contiguous())

    def to(self, dtype: torch.dtype) -> Tensors:
        return self._each(lambda x: x.to(dtype))

    def _each(self, change: object) -> Tensors:
        return replace(self, **{name: change(x) for name, x in vars(self).items()})  # type: ignore[operator]


@dataclass(frozen=True)
class Result:
    output: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor

    def unsharded(self, shards: Shards) -> Result:
        """From the shards of all ranks, one after the other along the tokens; without the padding."""
        return Result(
            *(
                shards.unshard(x.transpose(1, 2)).transpose(1, 2)[:, :, : shards.num_tokens]
                for x in (self.output, self.grad_query, self.grad_key, self.grad_value)
            )
        )

    def errors(self, expected: Result) -> dict[str, float]:
        """The largest difference of each, over the largest value expected."""
        return {
            name: float((x.double() - vars(expected)[name].double()).abs().max() / vars(expected)[name].abs().max())
            for name, x in vars(self).items()
        }


def documents(case: Case) -> Tensor | None:
    """[B, L]: packed: of other lengths in each row; padded: at the end of one row, at the beginning of the next."""
    if case.documents == "one":
        return None
    generator = torch.Generator().manual_seed(5)
    rows = []
    for row in range(case.batch_size):
        if case.documents == "packed":
            begins = torch.rand(case.num_tokens, generator=generator) < 6 / case.num_tokens
            rows.append(begins.long().cumsum(0))
        else:
            ids = torch.zeros(case.num_tokens, dtype=torch.int64)
            num_padding = case.num_tokens // 3 + row
            (ids[-num_padding:] if row % 2 == 0 else ids[:num_padding]).fill_(PADDING)
            rows.append(ids)
    return torch.stack(rows)


def make_tensors(case: Case, seed: int = 3) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def normal(num_heads: int, dim: int) -> Tensor:
        shape = (case.batch_size, num_heads, case.num_tokens, dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Tensors(
        normal(case.num_heads, case.head_dim),
        normal(case.num_kv_heads, case.head_dim),
        normal(case.num_kv_heads, case.value_head_dim),
        normal(case.num_heads, case.value_head_dim),
    )


def seen(case: Case) -> Tensor:
    """[B or 1, 1, L, L], straight from the rule."""
    index = torch.arange(case.num_tokens)
    distance = index[:, None] - index[None]
    mask = (distance >= 0) if case.causal else torch.ones_like(distance, dtype=torch.bool)
    if case.window is not None:
        mask &= distance.abs() < case.window
    ids = documents(case)
    if ids is None:
        return mask[None, None]
    return (mask & (ids[:, :, None] == ids[:, None]) & (ids != PADDING)[:, :, None])[:, None]


def full_attention(case: Case, tensors: Tensors) -> Result:
    """By softmax over all scores, in the dtype of the tensors; queries that see nothing give zeros."""
    query, key, value = (x.clone().requires_grad_() for x in (tensors.query, tensors.key, tensors.value))
    num_shared = case.num_heads // case.num_kv_heads
    mask = seen(case)
    blind = ~mask.any(-1, keepdim=True)
    scores = query @ key.repeat_interleave(num_shared, 1).mT * case.head_dim**-0.5
    # A row of -inf alone would be NaN: it sees all here, and its output is left out.
    weights = scores.masked_fill(~(mask | blind), -torch.inf).softmax(-1)
    output = (weights @ value.repeat_interleave(num_shared, 1)).masked_fill(blind, 0.0)
    return Result(output.detach(), *torch.autograd.grad(output, (query, key, value), tensors.grad_output))
