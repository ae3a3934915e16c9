"""A checkpoint is written beside its place and moves there when it is whole; ``latest`` never names a broken one.

DeepSpeed writes into the folder that ``latest`` may already name, lets rank 0 rewrite ``latest`` while other ranks are
still busy, and truncates that file first. Here, whoever dies at whatever moment leaves ``latest`` on a whole
checkpoint. (A machine that loses power may still lose what its operating system had not written.) Plain files, no
process group.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_STAGED = ".saving"
_LATEST = "latest"


def staged_tag(tag: str) -> str:
    """The tag under which the files of ``tag`` are written first."""
    return tag + _STAGED


def read_latest(folder: str | Path, name: str = _LATEST) -> str | None:
    """The tag that ``latest`` names, or None without such a file."""
    path = Path(folder, name)
    return path.read_text().strip() if path.is_file() else None


def name_latest(folder: Path, tag: str, name: str = _LATEST) -> None:
    """Let ``latest`` name ``tag``, in one step."""
    new = folder / f"{name}.new"
    new.write_text(tag)
    os.replace(new, folder / name)


def begin(folder: str | Path, tag: str) -> None:
    """Make room for a new checkpoint, and finish what a run that died in :func:`publish` had begun."""
    folder = Path(folder)
    named = read_latest(folder)
    if named is not None and named.endswith(_STAGED):
        _replace(folder, named.removesuffix(_STAGED))
    _remove(folder / staged_tag(tag))


def publish(folder: str | Path, tag: str, *, save_latest: bool) -> None:
    """Move what was written under ``staged_tag(tag)`` to ``tag``. All ranks have written their files.

    An older checkpoint of that tag goes when the new one stands in its place; until then ``latest``, if it named the
    older one or is to name the new one, names the staged files.
    """
    folder = Path(folder)
    if (folder / tag).exists():
        if save_latest or read_latest(folder) == tag:
            name_latest(folder, staged_tag(tag))
            _replace(folder, tag)
            return
        _move_away(folder, tag)
    os.rename(folder / staged_tag(tag), folder / tag)
    if save_latest:
        name_latest(folder, tag)
    _remove(_older(folder, tag))


def _replace(folder: Path, tag: str) -> None:
    """Put the staged files, which ``latest`` names, in the place of ``tag``. May be repeated from any point."""
    staged, fresh = folder / staged_tag(tag), folder / f"{tag}.fresh"
    _remove(fresh)
    shutil.copytree(staged, fresh, copy_function=_link_or_copy)
    _move_away(folder, tag)
    os.rename(fresh, folder / tag)
    name_latest(folder, tag)
    _remove(staged)
    _remove(_older(folder, tag))


def _move_away(folder: Path, tag: str) -> None:
    if (folder / tag).exists():
        _remove(_older(folder, tag))
        os.rename(folder / tag, _older(folder, tag))


def _older(folder: Path, tag: str) -> Path:
    return folder / f"{tag}.older"


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _link_or_copy(source: str, target: str) -> None:
    """A second name for the same bytes, or where the file system has none, a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
