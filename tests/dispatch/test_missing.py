"""The message about an exchange that failed comes in bounded time, whatever becomes of the store."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ds_hybrid.dispatch import missing


class Store:
    """Holds the notes of some ranks; ``answers`` says whether a question is ever answered."""

    def __init__(self, keys: list[str], *, answers: bool = True) -> None:
        self._keys = set(keys)
        self._answers = answers

    def set(self, key: str, value: str) -> None:
        self._keys.add(key)

    def check(self, keys: list[str]) -> bool:
        if not self._answers:
            threading.Event().wait()
        return all(key in self._keys for key in keys)


class GoneStore(Store):
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize(
    ("store", "which"),
    [
        (Store(["ds_hybrid/moe.0/failed at rank 5"]), "ranks 6"),
        (Store([], answers=False), "some ranks"),
        (GoneStore([]), "some ranks"),
    ],
    ids=["one rank missing", "store on a silent host", "store gone"],
)
def test_the_message(store: Store, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = SimpleNamespace(process_group=object())
    monkeypatch.setattr(missing, "_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(missing, "_STORE_SECONDS", 0.2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5, 6])
    monkeypatch.setattr(dist, "get_rank", lambda: 4)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    error = missing.explained(RuntimeError("Timed out waiting 10000ms"), group, layer="moe.0")
    assert str(error).startswith(f"moe.0: {which} of the expert-parallel group [4, 5, 6] did not come to its exchange.")
    assert str(error).endswith("The backend says: Timed out waiting 10000ms")
