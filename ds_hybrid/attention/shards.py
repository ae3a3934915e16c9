"""How a sequence lies over the ranks that share it. Pure NumPy.

Under a causal mask late queries see more keys than early ones. So the sequence is cut into 2n chunks, and rank j holds
chunks j and 2n-1-j: an early and a late one, which makes all ranks' work equal. Without a causal mask rank j holds the
j-th of n chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ds_hybrid.errors import ConfigError

Order = Literal["balanced", "consecutive"]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenRun:
    """Tokens that follow one another in the sequence and in memory.

    Attributes:
        row: where the first of them lies, in its shard or in a message.
        index: its place in the sequence.
        length: how many there are.
    """

    row: int
    index: int
    length: int


@dataclass(frozen=True)
class TokenBlock:
    """Keys and values of one rank that come together: ``runs`` says which tokens lie at which rows of the block."""

    rank: int
    runs: tuple[TokenRun, ...]

    @cached_property
    def num_rows(self) -> int:
        return sum(run.length for run in self.runs)

    @cached_property
    def index(self) -> IntArray:
        """[num_rows], the place in the sequence of each row."""
        return np.concatenate([np.arange(run.index, run.index + run.length) for run in self.runs])


@dataclass(frozen=True)
class Shards:
    """A sequence of ``num_tokens`` over ``num_ranks``, padded at its end so that all shards are equally long.

    Raises ``ConfigError`` for a sequence without tokens or a group without ranks.
    """

    num_tokens: int
    num_ranks: int
    order: Order = "balanced"

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.num_ranks < 1:
            raise ConfigError(
                f"a sequence of {self.num_tokens} tokens over {self.num_ranks} ranks: both must be at least 1."
            )

    @cached_property
    def num_chunks(self) -> int:
        return 2 * self.num_ranks if self.order == "balanced" else self.num_ranks

    @cached_property
    def chunk_length(self) -> int:
        return -(-self.num_tokens // self.num_chunks)

    @property
    def padded_length(self) -> int:
        """Tokens of all shards, the ``padded_length - num_tokens`` last of which are padding."""
        return self.num_chunks * self.chunk_length

    @property
    def shard_length(self) -> int:
        return self.padded_length // self.num_ranks

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order in which it holds them."""
        return (rank, self.num_chunks - 1 - rank) if self.order == "balanced" else (rank,)

    def block(self, rank: int) -> TokenBlock:
        """The whole shard of a rank."""
        (block,) = self.pieces(rank, 1)
        return block

    def pieces(self, rank: int, num_pieces: int) -> tuple[TokenBlock, ...]:
        """The shard of a rank cut into pieces, each with a part of every chunk, so that each piece is as much work on
        one rank as on another. Their rows, one piece after the other, are ``piece_rows``.

        At most ``chunk_length`` pieces come, none of them empty.
        """
        bounds = self._bounds(num_pieces)
        return tuple(
            TokenBlock(
                rank,
                tuple(
                    TokenRun(i * (end - begin), chunk * self.chunk_length + begin, end - begin)
                    for i, chunk in enumerate(self.chunks(rank))
                ),
            )
            for begin, end in pairwise(bounds)
        )

    def piece_rows(self, num_pieces: int) -> tuple[tuple[slice, ...], ...]:
        """Where in a shard the rows of each of :meth:`pieces` lie; the same for every rank."""
        bounds = self._bounds(num_pieces)
        num_parts = len(self.chunks(0))
        return tuple(
            tuple(slice(i * self.chunk_length + begin, i * self.chunk_length + end) for i in range(num_parts))
            for begin, end in pairwise(bounds)
        )

    def _bounds(self, num_pieces: int) -> list[int]:
        num_pieces = max(1, min(num_pieces, self.chunk_length))
        return [self.chunk_length * piece // num_pieces for piece in range(num_pieces + 1)]

    def index(self, rank: int) -> IntArray:
        """[shard_length], the places in the padded sequence of a rank's tokens."""
        return self.block(rank).index

    def shard(self, values: Any, rank: int) -> Any:
        """The part of a rank: [B, padded_length, ...] -> [B, shard_length, ...], NumPy or torch."""
        assert values.shape[1] == self.padded_length, (values.shape, self)
        return values[:, self.index(rank)]

    def unshard(self, values: Any) -> Any:
        """All shards, rank 0's first, as the sequence: [B, padded_length, ...] likewise, padding included."""
        assert values.shape[1] == self.padded_length, (values.shape, self)
        return values[:, np.argsort(np.concatenate([self.index(rank) for rank in range(self.num_ranks)]))]
