"""The lock files of torch's extension builds.

torch makes one while it compiles or loads an extension (``torch.utils.cpp_extension``) and removes it afterwards. When
its maker is killed it stays, and whoever wants the extension then waits for it without end and without a word.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from glob import glob
from pathlib import Path

from ds_hybrid.doctor.facts import Lock


def find_locks(pattern: str) -> tuple[Lock, ...]:
    """The lock files that match a glob pattern. Without /proc none is found, as nobody could tell which are held."""
    everyone = [int(process.name) for process in Path("/proc").glob("[0-9]*")]
    return _find(pattern, everyone) if os.path.isdir("/proc/self/fd") else ()


def locks_held_by(processes: Iterable[int], pattern: str) -> tuple[Lock, ...]:
    """Those of the lock files that one of the processes has made, and still holds. Ask before you kill them."""
    return tuple(lock for lock in _find(pattern, list(processes)) if lock.is_held)


def remove_locks(locks: Iterable[Lock]) -> None:
    """Remove what processes have left that held these locks and are dead.

    No other lock: hosts may share the folder, and nobody can tell here whether another host still holds one.
    """
    for lock in locks:
        with contextlib.suppress(FileNotFoundError):
            if _identity(os.stat(lock.path)) == lock.identity:
                os.unlink(lock.path)


def _find(pattern: str, processes: Iterable[int]) -> tuple[Lock, ...]:
    """The lock files, ``is_held`` by one of the processes."""
    locks = []
    for path in sorted(glob(pattern)):
        with contextlib.suppress(FileNotFoundError):
            before = os.stat(path)
            is_held = any(os.path.samestat(before, opened) for opened in _open_files(processes))
            # Its maker closes it first and removes it then.
            if os.path.samestat(before, os.stat(path)):
                locks.append(Lock(path, _identity(before), is_held))
    return tuple(locks)


def _identity(file: os.stat_result) -> str:
    return f"{file.st_ino}:{file.st_mtime_ns}"


def _open_files(processes: Iterable[int]) -> Iterator[os.stat_result]:
    """What the processes of this host have open, as far as we may look."""
    for process in processes:
        folder = f"/proc/{process}/fd"
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(folder):
                with contextlib.suppress(OSError):
                    yield os.stat(f"{folder}/{descriptor}")
