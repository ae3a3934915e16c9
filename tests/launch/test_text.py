"""The training text: who sees which bytes, and when."""

from pathlib import Path

import numpy as np
import pytest
from text import BLOCK_BYTES, HELD_OUT_EVERY, Shard, Windows, held_out_batches, read_corpus, train_batch

from ds_hybrid.errors import ConfigError

SEQ_LEN = 8
NUM_WINDOWS = 24


@pytest.fixture
def windows() -> Windows:
    return Windows(np.arange(NUM_WINDOWS * SEQ_LEN + 1).astype(np.uint8), SEQ_LEN)


def starts(batch: np.ndarray) -> list[int]:
    """The index of each window of a batch: the text counts its own bytes."""
    return [int(window[0]) // SEQ_LEN for window in batch]


def write_blocks(path: Path, num_blocks: int) -> bytes:
    """A file in which every four bytes are unlike any others."""
    text = np.arange(num_blocks * BLOCK_BYTES // 4, dtype=np.uint32).tobytes()
    path.write_bytes(text)
    return text


def test_targets_are_inputs_moved_by_one_and_every_byte_but_the_first_is_one(windows: Windows) -> None:
    taken = windows.take(np.arange(NUM_WINDOWS))
    assert taken[:, 1:].reshape(-1).tolist() == windows.text[1:].tolist()
    assert (taken[:, 1:-1] == taken[:, :-1][:, 1:]).all()


@pytest.mark.parametrize(("world", "batch_size"), [(1, 4), (2, 3), (4, 2), (3, 8)])
def test_an_epoch_gives_every_window_to_one_rank_once(windows: Windows, world: int, batch_size: int) -> None:
    for first_step in (0, NUM_WINDOWS // (world * batch_size)):
        seen = [
            start
            for step in range(first_step, first_step + NUM_WINDOWS // (world * batch_size))
            for rank in range(world)
            for start in starts(train_batch(windows, step, Shard(rank, world, batch_size), seed=0))
        ]
        assert sorted(seen) == list(range(NUM_WINDOWS))


def test_global_batches_do_not_depend_on_the_number_of_ranks(windows: Windows) -> None:
    for step in range(5):
        alone = train_batch(windows, step, Shard(0, 1, 10), seed=3)
        shared = [train_batch(windows, step, Shard(rank, 5, 2), seed=3) for rank in range(5)]
        assert np.concatenate(shared).tolist() == alone.tolist()


def test_order_follows_from_seed_and_step_alone(windows: Windows) -> None:
    shard = Shard(1, 2, 4)
    forwards = [train_batch(windows, step, shard, seed=1).tolist() for step in range(7)]
    backwards = [train_batch(windows, step, shard, seed=1).tolist() for step in reversed(range(7))]
    assert forwards == backwards[::-1]
    assert forwards != [train_batch(windows, step, shard, seed=2).tolist() for step in range(7)]


def test_a_batch_may_run_over_the_end_of_an_epoch(windows: Windows) -> None:
    drawn = [start for step in range(4) for start in starts(train_batch(windows, step, Shard(0, 1, 18), seed=0))]
    for epoch in range(3):
        assert sorted(drawn[epoch * NUM_WINDOWS : (epoch + 1) * NUM_WINDOWS]) == list(range(NUM_WINDOWS))
    assert drawn[:NUM_WINDOWS] != drawn[NUM_WINDOWS : 2 * NUM_WINDOWS]


def test_held_out_batches_of_all_ranks_are_disjoint_and_spread_over_the_text(windows: Windows) -> None:
    seen = [
        start
        for rank in range(2)
        for batch in held_out_batches(windows, 3, Shard(rank, 2, 2))
        for start in starts(batch)
    ]
    assert sorted(seen) == list(range(0, NUM_WINDOWS, 2))


def test_held_out_text_is_not_trained_on(tmp_path: Path) -> None:
    text = write_blocks(tmp_path / "text", 2 * HELD_OUT_EVERY)
    corpus = read_corpus(tmp_path / "text")
    assert len(corpus.held_out) == 2 * BLOCK_BYTES
    train, held_out = (set(part.view(np.uint32).tolist()) for part in (corpus.train, corpus.held_out))
    assert not train & held_out
    assert train | held_out == set(np.frombuffer(text, dtype=np.uint32).tolist())


def test_a_short_text_is_held_out_in_smaller_blocks(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(100)))
    assert read_corpus(tmp_path / "text").held_out.tolist() == list(range(90, 100))


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    whole = write_blocks(tmp_path / "whole", HELD_OUT_EVERY)
    folder = tmp_path / "folder"
    (folder / ".git").mkdir(parents=True)
    (folder / "sub").mkdir()
    (folder / "sub" / "b").write_bytes(whole[1000:])
    (folder / "a").write_bytes(whole[:1000])
    (folder / ".git" / "x").write_bytes(b"hidden")
    assert read_corpus(folder).train.tolist() == read_corpus(tmp_path / "whole").train.tolist()


def test_the_default_is_megabytes_of_python_sources() -> None:
    corpus = read_corpus(None)
    assert len(corpus.train) > 2**20
    assert b"def " in corpus.held_out.tobytes()


def test_what_a_user_can_get_wrong_is_named(tmp_path: Path, windows: Windows) -> None:
    missing, short = tmp_path / "missing", tmp_path / "short"
    short.write_bytes(b"too short")
    with pytest.raises(ConfigError, match=rf"^--text {missing}: no such file or folder\. Leave --text out"):
        read_corpus(missing)
    with pytest.raises(ConfigError, match=rf"^--text {short}: 9 bytes, but it takes 10 to .*Give a longer file"):
        read_corpus(short)
    with pytest.raises(ConfigError, match=r"8 bytes, but a window of --seq-len 8 takes 9\..*shorter --seq-len"):
        Windows(np.zeros(8, dtype=np.uint8), 8)
    with pytest.raises(ConfigError, match=r"2 ranks x 7 batches x 2 windows = 28, .* has 24 windows\. Give at most 6"):
        held_out_batches(windows, 7, Shard(0, 2, 2))
