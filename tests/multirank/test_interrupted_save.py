"""A rank that is killed while saving leaves the previous checkpoint whole, and ``latest`` on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from tests.multirank.explicit import Setup
from tests.multirank.states import differences, logical_states
from tests.multirank.test_checkpoint import make_explicit_engine, place_anew, train_explicit
from tests.ranks import RankFailureError, RankPool

SETUP = Setup(num_steps=1, lengths=(6, 6))


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def test_the_previous_checkpoint_is_loaded_after_a_kill(pool: RankPool, tmp_path: Path) -> None:
    """The older step is loaded, unless the new one was whole on every rank: then the new one."""
    folder = str(tmp_path)
    pool.run(save_first, folder)
    cases = [
        # who dies, at which call of what, and the tag of that save
        (1, "save", 0, "second", 1),
        (0, "save", 3, "first", 1),
        (0, "rename", 0, "first", 2),
    ]
    for rank, call, number, tag, expected_step in cases:
        with pytest.raises(RankFailureError):
            pool.run(save_and_die, folder, rank, call, number, tag, limit=60.0)
        assert pool.run(load_latest, folder) == [(expected_step, [])] * 2, (rank, call, number, tag)


def save_first(folder: str) -> None:
    engine = make_explicit_engine(SETUP)
    _train_and_note(engine, folder)
    engine.save_checkpoint(folder, "first")
    engine.destroy()


def save_and_die(folder: str, rank: int, call: str, number: int, tag: str) -> None:
    """One step on from the checkpoint, and a save during which ``rank`` is killed."""
    engine = make_explicit_engine(SETUP)
    engine.load_checkpoint(folder)
    _train_and_note(engine, folder)
    if dist.get_rank() == rank:
        owner: Any = TorchCheckpointEngine if call == "save" else os
        original, left = getattr(owner, call), [number]

        def call_or_die(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os._exit(9)
            left[0] -= 1
            return original(*args, **kwargs)

        setattr(owner, call, call_or_die)
    engine.save_checkpoint(folder, tag)


def load_latest(folder: str) -> tuple[int, list[str]]:
    """The step that ``latest`` has, and what differs from the states noted at that step."""
    engine = make_explicit_engine(SETUP)
    engine.load_checkpoint(folder)
    noted = _noted(folder, engine.global_steps)
    changed = differences(logical_states(engine), noted)
    engine.destroy()
    return engine.global_steps, changed


def _train_and_note(engine: Any, folder: str) -> None:
    place_anew(engine, seed=engine.global_steps)
    train_explicit(engine, SETUP)
    states = logical_states(engine)
    torch.save(states, Path(folder, f"states{engine.global_steps}_{dist.get_rank()}"))


def _noted(folder: str, step: int) -> Any:
    return torch.load(Path(folder, f"states{step}_{dist.get_rank()}"))
