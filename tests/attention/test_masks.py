from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_hybrid.attention.masks import MASK_ROWS, MaskRule, Sight, documents_of, split_work
from ds_hybrid.attention.shards import Shards, TokenBlock
from ds_hybrid.errors import ConfigError
from tests.attention.reference import Case, seen

CPU = torch.device("cpu")
CASES = {
    "causal": Case(200),
    "bidirectional": Case(200, causal=False, order="consecutive"),
    "window": Case(1500, window=70),
    "bidirectional window": Case(1500, causal=False, window=300, order="consecutive"),
    "window of one": Case(64, window=1),
    "padded": Case(203, documents="padded"),
    "packed": Case(1501, documents="packed"),
    "packed, in a window": Case(1501, documents="packed", window=50),
    "bidirectional, packed": Case(700, causal=False, documents="packed"),
}


def picture(sight: Sight, block: TokenBlock, largest: int | None = None) -> torch.Tensor:
    """[B, queries, keys]: how often each pair is computed and seen."""
    total = torch.zeros(sight.num_rows, sight.shards.shard_length, block.num_rows, dtype=torch.int64)
    for tile in sight.tiles(block, largest):
        part = total[:, tile.queries, tile.keys]
        if tile.kind == "masked":
            assert max(part.shape[1:]) <= MASK_ROWS
            part += sight.mask(block, tile, CPU)[:, 0]
        elif tile.kind == "causal":
            assert part.shape[1] == part.shape[2]
            part += torch.ones_like(part).tril()
        else:
            part += 1
        if largest is not None:
            assert max(part.shape[1:]) <= largest
    return total


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_tiles_are_what_the_rule_says(name: str, num_ranks: int) -> None:
    """Every pair that is seen is in one tile, and no other pair is; with whole blocks, pieces, and small tiles."""
    case = CASES[name]
    shards = case.shards(num_ranks)
    padding = shards.padded_length - case.num_tokens
    whole = torch.nn.functional.pad(seen(case), (0, padding, 0, padding))[:, 0]
    for rank in range(num_ranks):
        sight = case.sight(num_ranks, rank)
        mine = whole[:, shards.index(rank)].long()
        for source in range(num_ranks):
            blocks = [(shards.block(source), None), (shards.block(source), 40)]
            blocks += [(piece, None) for piece in shards.pieces(source, 3)]
            for block, largest in blocks:
                drawn = picture(sight, block, largest).expand(len(mine), -1, -1)
                expected = mine[:, :, block.index]
                assert (drawn == expected).all(), (rank, source, largest)


def test_blocks_without_a_mask_need_none_and_hidden_ones_are_left_out() -> None:
    """Rank 1 of 4: chunks 1 and 6. The early chunk of rank 0 is full for both, its late one is in the future."""
    shards = Shards(4096, 4)
    sight = Sight(shards, 1, MaskRule(causal=True))
    kinds = {
        source: [(t.queries.stop - t.queries.start, t.keys.stop - t.keys.start, t.kind) for t in tiles]
        for source in range(4)
        if (tiles := sight.tiles(shards.block(source)))
    }
    assert kinds[0] == [(1024, 512, "full")]
    assert sorted(kinds[1]) == [(512, 512, "causal"), (512, 512, "causal"), (512, 512, "full")]
    assert kinds[2] == kinds[3] == [(512, 1024, "full")]
    assert sum(tile.num_pairs for tile in sight.tiles(shards.block(2))) == 512 * 1024


@pytest.mark.parametrize("num_pieces", [1, 4])
def test_causal_pairs_are_equal_on_all_ranks(num_pieces: int) -> None:
    """Of each rank, and of each rank's pieces one after the other: nobody waits for a rank with more to do."""
    shards = Shards(2048, 4)
    work = []
    for rank in range(4):
        sight = Sight(shards, rank, MaskRule(causal=True))
        work.append(
            [
                sum(
                    tile.num_pairs
                    for source in range(4)
                    if source != rank
                    for tile in sight.tiles(shards.pieces(source, num_pieces)[number])
                )
                for number in range(num_pieces)
            ]
            + [sum(tile.num_pairs for tile in sight.tiles(shards.block(rank)))]
        )
    assert work == work[:1] * 4


def test_masks_are_made_for_the_border_alone() -> None:
    """A window: the area of masked tiles grows with the length, not with its square."""
    areas = []
    for length in (4096, 8192, 16384):
        shards = Shards(length, 4)
        sights = [Sight(shards, rank, MaskRule(causal=True, window=1024)) for rank in range(4)]
        tiles = [tile for sight in sights for source in range(4) for tile in sight.tiles(shards.block(source))]
        areas.append(sum(tile.num_pairs for tile in tiles if tile.kind == "masked"))
        assert sum(tile.num_pairs for tile in tiles) <= 2 * length * 1024
    assert areas[2] <= 2.5 * areas[1] <= 6.25 * areas[0]


def test_own_work_splits_in_halves() -> None:
    shards = Shards(4096, 4)
    tiles = Sight(shards, 2, MaskRule(causal=True)).tiles(shards.block(2), 512)
    first, last = split_work(tiles)
    assert sorted(map(str, (*first, *last))) == sorted(map(str, tiles))
    one, other = (sum(tile.num_pairs for tile in part) for part in (first, last))
    assert abs(one - other) <= 512


def test_documents_begin_where_positions_restart() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]])
    assert documents_of(positions).tolist() == [[0, 0, 0, 1, 1, 2, 3, 3], [0] * 8]
    left = torch.tensor([[1, 1, 1, 0, 1, 2, 3, 4]])  # as transformers numbers padding on the left
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    ids = documents_of(left, mask)[0]
    assert ids[:3].tolist() == [-1] * 3
    assert len(set(ids[3:].tolist())) == 1
    assert documents_of(positions, torch.tensor([[1] * 5 + [0] * 3, [1] * 8]))[0].tolist() == [
        0,
        0,
        0,
        1,
        1,
        -1,
        -1,
        -1,
    ]


def test_one_document_in_all_rows_is_no_documents() -> None:
    case = Case(64)
    sight = Sight(case.shards(2), 0, case.rule, torch.zeros(3, 64, dtype=torch.int64))
    assert sight.num_rows == 1
    assert {tile.kind for tile in sight.tiles(case.shards(2).block(1))} == {"full"}
    packed = replace(case, documents="packed")
    assert packed.sight(2, 0).num_rows == 2


def test_documents_that_do_not_fit() -> None:
    shards = Shards(10, 2)
    with pytest.raises(ConfigError, match=r"shape \[2, 9\]: must be \[batch, 10\], or \[batch, 12\]"):
        Sight(shards, 0, MaskRule(causal=True), torch.zeros(2, 9, dtype=torch.int64))
    falling = torch.tensor([[0, 0, 1, 1, 0, 0, 0, 0, 0, 0]])
    with pytest.raises(ConfigError, match="must not fall"):
        Sight(shards, 0, MaskRule(causal=True), falling)
    with pytest.raises(ConfigError, match="window of 0"):
        MaskRule(causal=True, window=0)
