"""A rank that is killed while saving leaves the previous checkpoint whole, and ``latest`` on it."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.multirank.explicit import Setup
from tests.multirank.states import differences, logical_states
from tests.multirank.test_checkpoint import make_explicit_engine, place_anew, train_explicit
from tests.ranks import RankFailureError, RankPool

WRITER = "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine:TorchCheckpointEngine"
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
    with pytest.raises(RankFailureError, match="rank 1: did not return"):
        pool.run(save_and_die, folder, "second", Death(rank=1, owner=WRITER, call="save"), limit=60.0)
    assert Path(folder, "latest").read_text() == "first"
    with pytest.raises(RankFailureError, match="rank 0: did not return"):  # about to replace the older of that tag
        pool.run(save_and_die, folder, "first", Death(rank=0, owner="os", call="rename"), limit=60.0)
    assert pool.run(load_latest, folder) == [2] * 2


@dataclass(frozen=True)
class Death:
    """Which rank dies when it calls what."""

    rank: int
    owner: str
    call: str


def save_first(folder: str) -> None:
    engine = make_explicit_engine(SETUP)
    _train_and_note(engine, folder)
    engine.save_checkpoint(folder, "first")
    engine.destroy()


def save_and_die(folder: str, tag: str, death: Death) -> None:
    """One step on from the checkpoint, and a save during which a rank is killed."""
    engine = make_explicit_engine(SETUP)
    assert load_and_compare(engine, folder) == 1
    _train_and_note(engine, folder)
    if dist.get_rank() == death.rank:
        setattr(pkgutil.resolve_name(death.owner), death.call, lambda *args, **kwargs: os._exit(9))
    engine.save_checkpoint(folder, tag)


def load_latest(folder: str) -> int:
    engine = make_explicit_engine(SETUP)
    step = load_and_compare(engine, folder)
    engine.destroy()
    return step


def load_and_compare(engine: Any, folder: str) -> int:
    """The step of the checkpoint, whose states are those that were noted then."""
    engine.load_checkpoint(folder)
    noted = torch.load(Path(folder, f"states{engine.global_steps}_{dist.get_rank()}"))
    assert differences(logical_states(engine), noted) == []
    return int(engine.global_steps)


def _train_and_note(engine: Any, folder: str) -> None:
    place_anew(engine, seed=engine.global_steps)
    train_explicit(engine, SETUP)
    torch.save(logical_states(engine), Path(folder, f"states{engine.global_steps}_{dist.get_rank()}"))
