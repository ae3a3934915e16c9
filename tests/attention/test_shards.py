from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_hybrid.attention.shards import Order, Shards
from ds_hybrid.errors import ConfigError

ORDERS: tuple[Order, ...] = ("balanced", "consecutive")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("num_tokens", "num_ranks"), [(1, 1), (5, 4), (64, 2), (101, 3), (96, 8)])
def test_every_token_lies_once_and_comes_back(num_tokens: int, num_ranks: int, order: Order) -> None:
    shards = Shards(num_tokens, num_ranks, order)
    assert 0 <= shards.padded_length - num_tokens < shards.num_chunks
    assert shards.shard_length * num_ranks == shards.padded_length
    values = np.arange(2 * shards.padded_length * 3).reshape(2, shards.padded_length, 3)
    for whole in (values, torch.from_numpy(values)):
        parts = [shards.shard(whole, rank) for rank in range(num_ranks)]
        assert {part.shape for part in parts} == {(2, shards.shard_length, 3)}
        joined = np.concatenate(parts, 1) if isinstance(whole, np.ndarray) else torch.cat(parts, 1)
        assert (shards.unshard(joined) == whole).all()


def test_balanced_ranks_hold_an_early_and_a_late_chunk() -> None:
    assert Shards(12, 3).index(0).tolist() == [0, 1, 10, 11]
    assert Shards(12, 3).index(1).tolist() == [2, 3, 8, 9]
    assert Shards(12, 3, "consecutive").index(1).tolist() == [4, 5, 6, 7]


def test_causal_work_is_equal_when_balanced() -> None:
    """Consecutive shards: the last of n ranks has 2 - 1/n times the mean."""
    for num_ranks, consecutive in ((4, 1.75), (8, 1.875)):
        assert imbalance(Shards(4096, num_ranks)) == 1.0
        assert imbalance(Shards(4096, num_ranks, "consecutive")) == pytest.approx(consecutive, rel=1e-3)


def imbalance(shards: Shards) -> float:
    """The busiest rank's (query, key) pairs under a causal mask over the mean."""
    pairs = [int((shards.index(rank) + 1).sum()) for rank in range(shards.num_ranks)]
    return max(pairs) / float(np.mean(pairs))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_pieces", [1, 3, 8, 100])
def test_pieces_are_the_shard_in_another_order(num_pieces: int, order: Order) -> None:
    shards = Shards(101, 3, order)
    rows = shards.piece_rows(num_pieces)
    assert sorted(i for piece in rows for part in piece for i in range(part.start, part.stop)) == list(
        range(shards.shard_length)
    )
    assert len(rows) == min(num_pieces, shards.chunk_length)
    for rank in range(3):
        for piece, parts in zip(shards.pieces(rank, num_pieces), rows, strict=True):
            assert piece.num_rows > 0
            assert piece.index.tolist() == np.concatenate([shards.index(rank)[part] for part in parts]).tolist()
            assert [run.row for run in piece.runs] == np.cumsum([0, *(r.length for r in piece.runs)])[:-1].tolist()


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="0 tokens over 4 ranks"):
        Shards(0, 4)
