"""A rank's queries against blocks of keys and values, tile by tile: forward, and backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.attention.blocks import Kernel, Mask, Merged, Part, Whole, sum_dtype
from ds_hybrid.attention.masks import Sight, Tile
from ds_hybrid.attention.shards import TokenBlock


@dataclass(frozen=True)
class KVBlock:
    """Keys and values [B, KV, R, D] of some tokens of one rank."""

    of: TokenBlock
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class PassRules:
    """How scores become an output: the same in both passes of a call."""

    sight: Sight
    kernel: Kernel
    scale: float

    def mask(self, block: TokenBlock, tile: Tile, device: torch.device) -> Mask:
        return self.sight.mask(block, tile, device) if tile.kind == "masked" else tile.kind

    def part(self, query: Tensor, block: KVBlock, tile: Tile) -> Part:
        """The tile of all of the rank's queries against a block."""
        keys = tile.keys
        mask = self.mask(block.of, tile, query.device)
        return Part(query[:, :, tile.queries], block.key[:, :, keys], block.value[:, :, keys], mask, self.scale)


class ForwardPass:
    """Adds up what the queries get from each block."""

    def __init__(self, rules: PassRules, query: Tensor, value_dim: int) -> None:
        self._rules = rules
        self._query = query
        self.merged = Merged.empty(query, value_dim)

    def add(self, block: KVBlock) -> None:
        for tile in self._rules.sight.tiles(block.of):
            self.add_tile(block, tile)

    def add_tile(self, block: KVBlock, tile: Tile) -> None:
        output, lse = self._rules.kernel.forward(self._rules.part(self._query, block, tile))
        self.merged.add(tile.queries, output, lse)

    def scores(self, of: TokenBlock, key: Tensor, tile: Tile) -> Tensor:
        """The scores of a tile whose values have not come; :meth:`add_scores` does the rest."""
        query = self._query[:, :, tile.queries]
        mask = self._rules.mask(of, tile, self._query.device)
        return self._rules.kernel.scores(query, key[:, :, tile.keys], mask, self._rules.scale)

    def add_scores(self, scores: Tensor, value: Tensor, tile: Tile) -> None:
        output, lse = self._rules.kernel.weigh(scores, value[:, :, tile.keys])
        self.merged.add(tile.queries, output, lse)


class BackwardPass:
    """Gives the gradients of each block, and adds up those of the queries in ``grad_query``.

    Args:
        output, lse: of the whole, lse with +inf where nothing was seen.
    """

    def __init__(self, rules: PassRules, query: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor) -> None:
        self._rules = rules
        self._query, self._output, self._lse, self._grad_output = query, output, lse, grad_output
        self.grad_query = torch.zeros_like(query, dtype=sum_dtype(query.dtype))

    def gradients(self, block: KVBlock, tiles: tuple[Tile, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Of a block's keys and values, from these queries, in the dtype of sums.

        Args:
            tiles: only what these give.
        """
        grad_key, grad_value = (
            torch.zeros_like(x, dtype=self.grad_query.dtype, memory_format=torch.contiguous_format)
            for x in (block.key, block.value)
        )
        for tile in self._rules.sight.tiles(block.of) if tiles is None else tiles:
            rows = tile.queries
            whole = Whole(self._output[:, :, rows], self._lse[:, :, rows], self._grad_output[:, :, rows])
            part = self._rules.part(self._query, block, tile)
            query_part, key_part, value_part = self._rules.kernel.backward(part, whole)
            self.grad_query[:, :, rows] += query_part
            grad_key[:, :, tile.keys] += key_part
            grad_value[:, :, tile.keys] += value_part
        return grad_key, grad_value
