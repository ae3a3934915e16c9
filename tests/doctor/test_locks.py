"""Lock files as torch makes and leaves them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from torch.utils.file_baton import FileBaton

from ds_hybrid.doctor.locks import find_locks, remove_new_locks

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


def test_a_new_file_has_another_identity_and_only_new_ones_that_nobody_holds_are_removed(tmp_path: Path) -> None:
    pattern = str(tmp_path / "*" / "lock")
    old, new, held = (tmp_path / op / "lock" for op in ("a", "b", "c"))
    for path in (old, new, held):
        path.parent.mkdir()
    old.touch()
    before = find_locks(pattern)
    new.touch()
    with held.open("w"):
        remove_new_locks(pattern, before)
        assert [path.exists() for path in (old, new, held)] == [True, False, True]
    old.rename(tmp_path / "moved")
    old.touch()
    remove_new_locks(pattern, before)
    assert not old.exists()
