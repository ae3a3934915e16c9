"""Whoever dies at whatever step of a save leaves ``latest`` on a whole checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_hybrid.engine.staging import begin, publish, read_latest, staged_tag

NUM_FILES = 3


class Died(BaseException):
    """In the place of SIGKILL: no handler of ours may catch it."""


@pytest.fixture
def dies_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Let the n-th change of the file system end the run, half done where it can be."""
    state = {"left": -1}

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if state["left"] == 0:
                raise Died
            state["left"] -= 1
            return function(*args, **kwargs)

        return call

    for name in ("rename", "replace", "link", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(Path, "write_text", counted(Path.write_text))
    yield lambda number: state.update(left=number)
    state["left"] = -1


def write(folder: Path, tag: str, content: str) -> None:
    """As all ranks do between ``begin`` and ``publish``."""
    os.makedirs(folder / tag, exist_ok=True)
    for number in range(NUM_FILES):
        path = folder / tag / f"file{number}"
        path.unlink(missing_ok=True)
        path.write_text(content)


def save(folder: Path, tag: str, content: str, *, save_latest: bool = True) -> None:
    begin(folder, tag)
    write(folder, staged_tag(tag), content)
    publish(folder, tag, save_latest=save_latest)


def content_of(folder: Path, tag: str) -> str:
    """The checkpoint that a load of ``tag`` finds; whole, or it fails."""
    contents = {(folder / tag / f"file{number}").read_text() for number in range(NUM_FILES)}
    assert len(contents) == 1, f"{tag} is a mixture of {contents}"
    return contents.pop()


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("a", "a"), ("deep/a", "deep/a")])
def test_a_death_at_any_step_leaves_latest_on_a_whole_checkpoint(
    tmp_path: Path, dies_at: Callable[[int], None], first: str, second: str
) -> None:
    died, number = True, 0
    found = []
    while died:
        folder = tmp_path / str(number)
        os.makedirs(folder)
        save(folder, first, "old")
        dies_at(number)
        died = False
        try:
            save(folder, second, "new")
        except Died:
            died = True
        dies_at(-1)
        latest = read_latest(folder)
        assert latest is not None
        found.append(content_of(folder, latest))
        save(folder, second, "newer")
        assert read_latest(folder) == second
        assert content_of(folder, second) == "newer"
        assert not (folder / staged_tag(second)).exists()
        number += 1
    assert found[0] == "old"
    assert found[-1] == "new"
    assert sorted(found, reverse=True) == found, "an old one came after a new one"
    assert number > 8


def test_a_checkpoint_that_latest_does_not_name_is_replaced_without_it(tmp_path: Path) -> None:
    save(tmp_path, "a", "old a")
    save(tmp_path, "b", "old b")
    save(tmp_path, "a", "new a", save_latest=False)
    assert read_latest(tmp_path) == "b"
    assert content_of(tmp_path, "a") == "new a"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "latest"]


def test_without_save_latest_the_named_one_is_replaced_all_the_same(tmp_path: Path) -> None:
    save(tmp_path, "a", "old")
    save(tmp_path, "a", "new", save_latest=False)
    assert (read_latest(tmp_path), content_of(tmp_path, "a")) == ("a", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest"]


def test_a_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path, "a", "old")
    save(tmp_path, "a", "new")
    assert content_of(tmp_path, "a") == "new"
