"""Appends records to a file of JSON lines, whole lines only."""

from __future__ import annotations

import os
from pathlib import Path

from ds_hybrid.errors import EventsError
from ds_hybrid.observe.events import EVENTS_FILE, TIMELINE_FILE, Record, TimelineRecord

_PIECE = 1 << 16


class RecordWriter:
    """Writes the records of one run, each at once, so that a crash loses at most the line that it interrupts.

    What a run before has left torn at the end of a file is cut off.

    Raises:
        EventsError: the directory, or a file in it, cannot be written.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._files = {name: _open(self.directory / name) for name in (EVENTS_FILE, TIMELINE_FILE)}
        except OSError as error:
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
        for file in self._files.values():
            os.close(file)
        self._files = {}


def _open(path: Path) -> int:
    """For appending; what follows the last whole line is cut off."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    end = size = os.fstat(file).st_size
    while end > 0:
        begin = max(end - _PIECE, 0)
        found = os.pread(file, end - begin, begin).rfind(b"\n")
        end = begin if found < 0 else begin + found + 1
        if found >= 0:
            break
    if end < size:
        os.ftruncate(file, end)
    return file
