"""What a query may see, and which blocks of scores need no mask, or need not be computed.

Every token has an index in the sequence and belongs to a document. A query sees a key iff both are of the same
document, the key is not later (causal), and the key is near enough (window). Padding is of no document: it sees nothing
and is not seen. Packed sequences, padding and sliding windows are all this one rule.

The scores of a rank, its queries against one block of keys, are cut into tiles. A tile is left out where nothing is
seen, computed without a mask where everything is, or on the diagonal with the kernel's own causal mask. Only what is
left, cut to at most ``MASK_ROWS`` x ``MASK_ROWS``, gets an explicit mask, which is made when the tile is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ds_hybrid.attention.shards import IntArray, Shards, TokenBlock, TokenRun
from ds_hybrid.errors import ConfigError

TileKind = Literal["full", "causal", "masked"]
MASK_ROWS = 256
PADDING = -1


@dataclass(frozen=True)
class MaskRule:
    """Attributes:
    causal: a query sees no later key.
    window: a query sees keys less than so many places away; None: any.
    """

    causal: bool
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"an attention window of {self.window}: must be at least 1, the token itself, or null.")


@dataclass(frozen=True)
class Tile:
    """A rectangle of scores: rows of the rank's queries, rows of a block of keys."""

    queries: slice
    keys: slice
    kind: TileKind

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs that are computed: half of a causal tile, and its diagonal."""
        rows, columns = _length(self.queries), _length(self.keys)
        return rows * (rows + 1) // 2 if self.kind == "causal" else rows * columns


def documents_of(position_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """The document of each token: a new one begins where positions do not go on by one.

    After padding inside a row, whose positions may count on or stand still, one begins only where they do not rise.

    Args:
        position_ids: [B, L] integers, in the order of the sequence.
        attention_mask: [B, L], 0 at padding; None: no padding.

    Returns:
        [B, L] int64, from 0 in each row; -1 at padding.
    """
    real = torch.ones_like(position_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    documents = _breaks(position_ids, real).long().cumsum(1)
    return documents.masked_fill(~real, PADDING)


def has_stray_positions(position_ids: Tensor, real: Tensor) -> Tensor:
    """[] bool: whether any document but a row's first begins at another position than 0, as parts of a sequence do that
    were put together wrongly. Arguments as for :func:`documents_of`.
    """
    return (_breaks(position_ids, real) & (position_ids != 0)).any()


def _breaks(position_ids: Tensor, real: Tensor) -> Tensor:
    """[B, L] bool: real tokens that do not follow the last real one before them. A row's first is none."""
    places = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    last = places.masked_fill(~real, -1).cummax(1).values
    before = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    step = position_ids - position_ids.gather(1, before.clamp_min(0))
    is_next = before == places - 1
    return real & (before >= 0) & torch.where(is_next, step != 1, step <= 0)


class Sight:
    """What the queries of one rank see. Made once for a batch, and used by all layers that share its rule.

    Args:
        shards: how the sequence lies over the ranks.
        rank: of the queries.
        rule: which keys a query sees.
        documents: [B, num_tokens] or [B, padded_length] int64 in the order of the sequence, -1 at padding, as
            :func:`documents_of` gives; within a row, what is not padding never falls. None: one document. The same on
            every rank. On a GPU its values are read once, here.

    Raises ``ConfigError`` where the shape does not fit, or documents fall.
    """

    def __init__(self, shards: Shards, rank: int, rule: MaskRule, documents: Tensor | None = None) -> None:
        self.shards, self.rank, self.rule = shards, rank, rule
        self._documents = _normalized(documents, shards)
        self._queries = shards.block(rank)
        self._tiles: dict[tuple[TokenBlock, int], tuple[Tile, ...]] = {}
        self._on_device: dict[tuple[TokenBlock, torch.device], tuple[Tensor, Tensor | None]] = {}

    @property
    def num_rows(self) -> int:
        """Rows of the batch that differ in what they see: 1 where all see the same."""
        return 1 if self._documents is None else len(self._documents)

    def tiles(self, block: TokenBlock, largest: int | None = None) -> tuple[Tile, ...]:
        """What of the rank's queries against ``block`` must be computed.

        Args:
            largest: the most rows or columns of a tile; None: as large as they come.
        """
        largest = largest or self.shards.padded_length
        key = block, largest
        if key not in self._tiles:
            found = [
                tile
                for keys in block.runs
                for queries in self._queries.runs
                for tile in self._cut(queries, keys, largest)
            ]
            self._tiles[key] = _joined(found, largest)
        return self._tiles[key]

    def mask(self, block: TokenBlock, tile: Tile, device: torch.device) -> Tensor:
        """What a masked tile sees: bool [B or 1, 1, rows, columns]."""
        query_index, query_documents = self._vectors(self._queries, device)
        key_index, key_documents = self._vectors(block, device)
        distance = query_index[tile.queries, None] - key_index[None, tile.keys]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.rule.causal:
            seen &= distance >= 0
        if self.rule.window is not None:
            seen &= distance.abs() < self.rule.window
        if query_documents is None or key_documents is None:
            return seen[None, None]
        of_queries, of_keys = query_documents[:, tile.queries, None], key_documents[:, None, tile.keys]
        return (seen & (of_queries == of_keys) & (of_queries != PADDING))[:, None]

    def _vectors(self, block: TokenBlock, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The index [rows] and, where there are several, the documents [B, rows] of a block's tokens."""
        key = block, device
        if key not in self._on_device:
            documents = self._documents
            self._on_device[key] = (
                torch.from_numpy(block.index).to(device),
                None if documents is None else torch.from_numpy(documents[:, block.index]).to(device),
            )
        return self._on_device[key]

    def _cut(self, queries: TokenRun, keys: TokenRun, largest: int) -> Iterator[Tile]:
        """Classify a rectangle; cut it in halves where it is neither one thing nor the other, or too large."""
        kind = self._kind(queries, keys)
        if kind == "empty":
            return
        longest = max(queries.length, keys.length)
        if longest <= (min(MASK_ROWS, largest) if kind == "masked" else largest):
            yield Tile(_rows(queries), _rows(keys), kind)
            return
        # A causal tile stays square: both sides are cut alike.
        for part in _halves(queries) if 2 * queries.length > longest else [queries]:
            for other in _halves(keys) if 2 * keys.length > longest else [keys]:
                yield from self._cut(part, other, largest)

    def _kind(self, queries: TokenRun, keys: TokenRun) -> TileKind | Literal["empty"]:
        nearest, farthest = _distances(queries, keys)
        rule = self.rule
        if rule.causal and farthest < 0:
            return "empty"
        least = 0 if nearest <= 0 <= farthest else min(abs(nearest), abs(farthest))
        if rule.window is not None and least >= rule.window:
            return "empty"
        same = self._same_document(queries, keys)
        if same == "none":
            return "empty"
        outside = rule.window is not None and max(-nearest, farthest) >= rule.window
        if same == "some":
            return "masked"
        if rule.causal and nearest < 0:
            on_diagonal = queries.index == keys.index and queries.length == keys.length
            return "causal" if on_diagonal and not (rule.window is not None and farthest >= rule.window) else "masked"
        return "masked" if outside else "full"

    def _same_document(self, queries: TokenRun, keys: TokenRun) -> Literal["all", "some", "none"]:
        """Whether the tokens of two runs are of one document, in all rows of the batch."""
        if self._documents is None:
            return "all"
        of_queries, of_keys = (self._documents[:, run.index : run.index + run.length] for run in (queries, keys))
        first_q, last_q = _range(of_queries)
        first_k, last_k = _range(of_keys)
        if ((last_q < first_k) | (last_k < first_q)).all():
            return "none"
        is_one = (of_queries == first_k[:, None]).all() and (of_keys == first_k[:, None]).all()
        return "all" if is_one and (first_k != PADDING).all() else "some"


def split_work(tiles: Sequence[Tile]) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """Two parts of about equal work."""
    parts: tuple[list[Tile], list[Tile]] = ([], [])
    work = [0, 0]
    for tile in sorted(tiles, key=lambda tile: -tile.num_pairs):
        lighter = work.index(min(work))
        parts[lighter].append(tile)
        work[lighter] += tile.num_pairs
    return tuple(parts[0]), tuple(parts[1])


def _normalized(documents: Tensor | None, shards: Shards) -> IntArray | None:
    """[B or 1, padded_length], or None where every token is of one document."""
    if documents is None:
        whole = np.zeros((1, shards.num_tokens), dtype=np.int64)
    else:
        whole = documents.detach().to("cpu", torch.int64).numpy()
        if whole.ndim != 2 or whole.shape[1] not in (shards.num_tokens, shards.padded_length):
            raise ConfigError(
                f"documents of shape {list(whole.shape)}: must be [batch, {shards.num_tokens}], or "
                f"[batch, {shards.padded_length}] with the padding."
            )
    missing = shards.padded_length - whole.shape[1]
    whole = np.pad(whole, ((0, 0), (0, missing)), constant_values=PADDING)
    rising = np.where(whole == PADDING, np.iinfo(np.int64).min, whole)
    if (np.where(whole == PADDING, np.iinfo(np.int64).max, whole) < np.maximum.accumulate(rising, axis=1)).any():
        raise ConfigError("documents must not fall along a sequence: number them in the order in which they come.")
    if not whole.any() and not missing:
        return None
    return whole[:1] if (whole == whole[:1]).all() else whole


def _range(documents: IntArray) -> tuple[IntArray, IntArray]:
    """[B], the first and the last document of each row; a last one before the first where all is padding."""
    real = documents != PADDING
    first = np.where(real, documents, np.iinfo(np.int64).max).min(1)
    last = np.where(real, documents, np.iinfo(np.int64).min).max(1)
    return first, last


def _distances(queries: TokenRun, keys: TokenRun) -> tuple[int, int]:
    """The least and the largest index of a query less that of a key."""
    return queries.index - (keys.index + keys.length - 1), queries.index + queries.length - 1 - keys.index


def _halves(run: TokenRun) -> list[TokenRun]:
    half = run.length // 2
    if not half:
        return [run]
    return [replace(run, length=half), TokenRun(run.row + half, run.index + half, run.length - half)]


def _joined(tiles: Sequence[Tile], largest: int) -> tuple[Tile, ...]:
    """Full tiles that touch and make a rectangle become one: first side by side, then one above the other."""
    by_keys = _join_along(tiles, "keys", "queries", largest)
    return tuple(_join_along(by_keys, "queries", "keys", largest))


def _join_along(tiles: Sequence[Tile], along: str, across: str, largest: int) -> list[Tile]:
    joined: list[Tile] = []
    ordered = sorted(tiles, key=lambda tile: (getattr(tile, across).start, getattr(tile, along).start))
    for tile in ordered:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.kind == tile.kind == "full"
            and getattr(last, across) == getattr(tile, across)
            and getattr(last, along).stop == getattr(tile, along).start
            and getattr(tile, along).stop - getattr(last, along).start <= largest
        ):
            sides = {across: getattr(tile, across), along: slice(getattr(last, along).start, getattr(tile, along).stop)}
            joined[-1] = Tile(sides["queries"], sides["keys"], "full")
        else:
            joined.append(tile)
    return joined


def _rows(run: TokenRun) -> slice:
    return slice(run.row, run.row + run.length)


def _length(rows: slice) -> int:
    return rows.stop - rows.start
