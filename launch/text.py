"""Real text as bytes: read from files, split into training and held-out text, and cut into batches.

Which window of the text a rank sees at a step depends on the seed, the step and the rank alone, so that a resumed run
goes on where the stopped one would have gone.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds_hybrid.errors import ConfigError

MAX_BYTES = 32 * 2**20
BLOCK_BYTES = 16 * 2**10
HELD_OUT_EVERY = 10
# Not the standard library itself: what was installed beside it, and its tests.
NOT_LIBRARY = {"site-packages", "dist-packages", "test"}


@dataclass(frozen=True)
class Corpus:
    """Two byte strings without a common block: ``train`` [N] uint8 and ``held_out`` [M] uint8."""

    train: NDArray[np.uint8]
    held_out: NDArray[np.uint8]


@dataclass(frozen=True)
class Windows:
    """``text`` [N] uint8 seen as windows of ``seq_len + 1`` bytes: inputs, and the same moved on by one as targets.

    Windows start every ``seq_len`` bytes, so that each byte but the first is a target once in an epoch. Raises
    ``ConfigError`` when there is not one window.
    """

    text: NDArray[np.uint8]
    seq_len: int

    def __post_init__(self) -> None:
        if self.num_windows < 1:
            raise ConfigError(
                f"text: {len(self.text)} bytes, but a window of --seq-len {self.seq_len} takes {self.seq_len + 1}. "
                "Give more text or a shorter --seq-len."
            )

    @property
    def num_windows(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def take(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The windows with these ``indices`` [B]: bytes as int64 [B, seq_len + 1]."""
        positions = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        windows: NDArray[np.int64] = self.text[positions].astype(np.int64)
        return windows


@dataclass(frozen=True)
class Shard:
    """The part of each global batch that one data-parallel rank takes: ``batch_size`` windows at a time."""

    rank: int
    world: int
    batch_size: int


def read_corpus(path: Path | None) -> Corpus:
    """Reads a file, or every file in a folder (in sorted order; hidden ones apart), up to 32 MiB in all.

    ``None`` stands for the Python standard library's own sources. One block of 16 KiB in 10 is held out (smaller blocks
    of a short text), so that both parts are drawn from everywhere in it. Raises ``ConfigError`` when nothing is there.
    """
    name = "of Python's own sources" if path is None else str(path)
    text = _read(_standard_library() if path is None else _files(path))
    block_bytes = min(BLOCK_BYTES, len(text) // HELD_OUT_EVERY)
    if block_bytes == 0:
        raise ConfigError(
            f"--text {name}: {len(text)} bytes, but it takes {HELD_OUT_EVERY} to hold some out. "
            "Give a longer file, or a folder with more files."
        )
    num_blocks = len(text) // block_bytes
    blocks = text[: num_blocks * block_bytes].reshape(num_blocks, block_bytes)
    is_held_out = np.arange(num_blocks) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return Corpus(train=blocks[~is_held_out].reshape(-1), held_out=blocks[is_held_out].reshape(-1))


def train_batch(windows: Windows, step: int, shard: Shard, *, seed: int) -> NDArray[np.int64]:
    """What a rank trains on at ``step`` (from 0): bytes as int64 [batch_size, seq_len + 1].

    In each epoch every window comes once, in an order of that epoch's own, whatever the number of ranks.
    """
    draws = (step * shard.world + shard.rank) * shard.batch_size + np.arange(shard.batch_size)
    epochs, places = np.divmod(draws, windows.num_windows)
    indices = np.empty(shard.batch_size, dtype=np.int64)
    for epoch in np.unique(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(windows.num_windows)
        indices[epochs == epoch] = order[places[epochs == epoch]]
    return windows.take(indices)


def held_out_batches(windows: Windows, num_batches: int, shard: Shard) -> list[NDArray[np.int64]]:
    """The ``num_batches`` batches a rank evaluates on, always the same, spread over the text: as in ``train_batch``.

    Raises ``ConfigError`` when the ranks together ask for more windows than there are.
    """
    num_per_batch = shard.world * shard.batch_size
    num_needed = num_batches * num_per_batch
    if num_needed > windows.num_windows:
        raise ConfigError(
            f"--eval-batches {num_batches}: {shard.world} ranks x {num_batches} batches x {shard.batch_size} windows = "
            f"{num_needed}, but the held-out text has {windows.num_windows} windows. Give at most "
            f"{windows.num_windows // num_per_batch} batches, a shorter --seq-len or more text."
        )
    indices = np.arange(num_needed) * windows.num_windows // num_needed
    return [windows.take(batch) for batch in indices.reshape(num_batches, shard.world, shard.batch_size)[:, shard.rank]]


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not NOT_LIBRARY.intersection(path.relative_to(root).parts):
            yield path


def _files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise ConfigError(f"--text {path}: no such file or folder. Leave --text out to train on Python's own sources.")
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            yield file


def _read(files: Iterator[Path]) -> NDArray[np.uint8]:
    text = bytearray()
    for file in files:
        if len(text) >= MAX_BYTES:
            break
        try:
            with file.open("rb") as stream:
                text += stream.read(MAX_BYTES - len(text))
        except OSError as error:
            raise ConfigError(f"--text {file}: {error.strerror}. Make it readable or take it away.") from error
    return np.frombuffer(bytes(text), dtype=np.uint8)
