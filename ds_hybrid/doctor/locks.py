"""The lock files of torch's extension builds.

torch makes one while it compiles or loads an extension (``torch.utils.cpp_extension``) and removes it afterwards. When
its maker is killed it stays, and whoever wants the extension then waits for it without end and without a word.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from glob import glob
from pathlib import Path

from ds_hybrid.doctor.facts import Lock


def find_locks(pattern: str) -> tuple[Lock, ...]:
    """The lock files that match a glob pattern. Without /proc none is found, as nobody could tell which are held."""
    locks = []
    for path in sorted(glob(pattern)) if os.path.isdir("/proc/self/fd") else []:
        with contextlib.suppress(FileNotFoundError):
            before = os.stat(path)
            is_held = any(os.path.samestat(before, opened) for opened in _open_files())
            # Its maker closes it first and removes it then.
            if os.path.samestat(before, os.stat(path)):
                locks.append(Lock(path, f"{before.st_ino}:{before.st_mtime_ns}", is_held))
    return tuple(locks)


def remove_new_locks(pattern: str, before: tuple[Lock, ...]) -> None:
    """Remove what processes that we have ended left: lock files that nobody holds and that were not there before."""
    known = {lock.identity for lock in before}
    for lock in find_locks(pattern):
        if not lock.is_held and lock.identity not in known:
            Path(lock.path).unlink(missing_ok=True)


def _open_files() -> Iterator[os.stat_result]:
    """What the processes of this host have open, as far as we may look."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(process / "fd"):
                with contextlib.suppress(OSError):
                    yield os.stat(process / "fd" / descriptor)
