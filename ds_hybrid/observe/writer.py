"""Appends records to a file of JSON lines, whole lines only."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from weakref import WeakMethod

from ds_hybrid.errors import EventsError
from ds_hybrid.observe.events import EVENTS_FILE, TIMELINE_FILE, Record, TimelineRecord

_PIECE = 1 << 16


class RecordWriter:
    """Writes the records of one run, each at once, so that a crash loses at most the line that it interrupts.

    The directory is this writer's alone until it is closed or its process ends, whatever workers it has forked. What a
    run before has left torn at the end of a file is cut off.

    Raises:
        EventsError: the directory, or a file in it, cannot be written, or another writer has it.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._files: dict[str, int] = {}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for name in (EVENTS_FILE, TIMELINE_FILE):
                self._files[name] = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            if not _lock(self._files[EVENTS_FILE]):
                raise EventsError(
                    f'ds_hybrid.observe.directory = "{directory}": another engine writes there now. Give each its own '
                    "directory, end an earlier one of this process with engine.destroy(), or set it to null."
                )
            for file in self._files.values():
                _cut_torn_end(file)
            _call_in_forked(WeakMethod(self._leave_to_parent))
        except EventsError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise EventsError(
                f'ds_hybrid.observe.directory = "{directory}": {error.strerror}: {error.filename}. Name a directory '
                "that rank 0 can write, or set it to null."
            ) from error

    def write(self, record: Record) -> None:
        """Append one record to the file that it belongs to.

        Raises:
            OSError: the disk is full, or the like.
        """
        name = TIMELINE_FILE if isinstance(record, TimelineRecord) else EVENTS_FILE
        line = memoryview(f"{record.to_line()}\n".encode())
        while line:
            line = line[os.write(self._files[name], line) :]

    def close(self) -> None:
        for name, file in self._files.items():
            if name == EVENTS_FILE:
                _unlock(file)
            os.close(file)
        self._files = {}

    def _leave_to_parent(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files = {}


def _call_in_forked(method: WeakMethod[Callable[[], None]]) -> None:
    """Call it in each process that this one forks, while its object is there."""

    def call() -> None:
        alive = method()
        if alive is not None:
            alive()

    os.register_at_fork(after_in_child=call)


def _lock(file: int) -> bool:
    """Whether nobody else has it. Where the file system knows no locks, everybody has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _unlock(file: int) -> None:
    """For a worker that is just being forked, too: it has the same lock for a moment."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


def _cut_torn_end(file: int) -> None:
    """Cut off what follows the last whole line."""
    end = size = os.fstat(file).st_size
    while end > 0:
        begin = max(end - _PIECE, 0)
        found = os.pread(file, end - begin, begin).rfind(b"\n")
        end = begin if found < 0 else begin + found + 1
        if found >= 0:
            break
    if end < size:
        os.ftruncate(file, end)
