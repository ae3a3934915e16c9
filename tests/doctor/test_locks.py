"""Lock files as torch makes and leaves them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torch.utils.file_baton import FileBaton

from ds_hybrid.doctor.locks import find_locks, locks_held_by, remove_locks

# Takes the lock as a build does; killed, it leaves the file.
TAKE = """
import sys
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("taken", flush=True)
sys.stdin.read()
"""


def test_held_and_left(tmp_path: Path) -> None:
    pattern = str(tmp_path / "*" / "lock")
    assert find_locks(pattern) == ()
    paths = [tmp_path / op / "lock" for op in ("cpu_adam", "deepspeed_shm_comm")]
    for path in paths:
        path.parent.mkdir()
    baton = FileBaton(str(paths[0]))
    assert baton.try_acquire()
    with subprocess.Popen(
        [sys.executable, "-c", TAKE, str(paths[1])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        found = find_locks(pattern)
        assert [(lock.path, lock.is_held) for lock in found] == [(str(path), True) for path in paths]
        other.kill()
    assert [lock.is_held for lock in find_locks(pattern)] == [True, False]
    assert [lock.identity for lock in find_locks(pattern)] == [lock.identity for lock in found]
    baton.release()
    assert [lock.path for lock in find_locks(pattern)] == [str(paths[1])]


def test_locks_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    """Those of strangers may be held on another host that shares the folder, where nobody here can look."""
    pattern = str(tmp_path / "*" / "lock")
    ours, held_here, held_elsewhere = (tmp_path / op / "lock" for op in ("a", "b", "c"))
    for path in (ours, held_here, held_elsewhere):
        path.parent.mkdir()
    held_elsewhere.touch()
    with held_here.open("w"):
        with subprocess.Popen(
            [sys.executable, "-c", TAKE, str(ours)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as maker:
            assert maker.stdout is not None
            assert maker.stdout.readline() == "taken\n"
            left = locks_held_by([maker.pid], pattern)
            maker.kill()
        assert [lock.path for lock in left] == [str(ours)]
        remove_locks(left)
        assert [path.exists() for path in (ours, held_here, held_elsewhere)] == [False, True, True]


def test_a_lock_that_another_process_has_made_since_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "a" / "lock"
    path.parent.mkdir()
    with path.open("w"):
        left = locks_held_by([os.getpid()], str(path))
    assert len(left) == 1
    path.rename(tmp_path / "moved")
    remove_locks(left)
    path.touch()
    remove_locks(left)
    assert path.exists()
