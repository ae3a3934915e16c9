"""Reads what a run wrote down in its directory, also while it goes on or after it crashed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import ValidationError

from ds_hybrid.errors import EventsError
from ds_hybrid.observe.events import (
    EVENTS_FILE,
    RECORDS,
    SCHEMA_VERSION,
    TIMELINE_FILE,
    AnyRecord,
    DispatcherRecord,
    GainRecord,
    RebalanceRecord,
    Record,
    ResumeRecord,
    RunRecord,
    StepRecord,
    TimelineRecord,
)

R = TypeVar("R", bound=Record)

_HEAD = re.compile(rb'\{"version":([0-9]+),"time":([^,]+),"step":([0-9]+),')
"""How every line begins that ds_hybrid wrote."""


@dataclass(frozen=True)
class RunEvents:
    """The events of a run in their order. Of a run that was resumed, each step is there once.

    Attributes:
        runs: one for each start.
        warnings: what was passed over, in words.
    """

    records: tuple[Record, ...]
    warnings: tuple[str, ...] = ()

    def _of(self, kind: type[R]) -> tuple[R, ...]:
        return tuple(record for record in self.records if isinstance(record, kind))

    @property
    def runs(self) -> tuple[RunRecord, ...]:
        return self._of(RunRecord)

    @property
    def resumes(self) -> tuple[ResumeRecord, ...]:
        return self._of(ResumeRecord)

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        return self._of(StepRecord)

    @property
    def dispatchers(self) -> tuple[DispatcherRecord, ...]:
        return self._of(DispatcherRecord)

    @property
    def rebalances(self) -> tuple[RebalanceRecord, ...]:
        return self._of(RebalanceRecord)

    @property
    def gains(self) -> tuple[GainRecord, ...]:
        return self._of(GainRecord)

    @property
    def run(self) -> RunRecord:
        """The start under which the last steps were made: one that has made none yet does not count."""
        return self.run_of(self.steps[-1].step) if self.steps else self.runs[-1]

    def run_of(self, step: int) -> RunRecord:
        """The start under which a step was made: that of the first step record that reaches it, else the last."""
        run = self.runs[0]
        for record in self.records:
            if isinstance(record, RunRecord):
                run = record
            elif isinstance(record, StepRecord) and record.step >= step:
                return run
        return self.runs[-1]


def read_events(run_directory: str | Path) -> RunEvents:
    """The events of a run; at least one start of it is there.

    Raises:
        EventsError: the directory has no events, or a line is damaged; the last one may be torn.
    """
    path = Path(run_directory) / EVENTS_FILE
    warnings: list[str] = []
    records: list[Record] = []
    began, is_new = 0, False
    resumed: tuple[int, int] | None = None  # from which step, and how many records came before
    for line in _lines(path, warnings):
        record = _record(line)
        if isinstance(record, ResumeRecord):
            resumed, is_new = (record.step, len(records)), False
        elif isinstance(record, RunRecord):
            began, is_new = len(records), True
        elif isinstance(record, StepRecord):
            if is_new:  # it was not resumed, so it began anew in the same directory
                del records[:began]
            elif resumed is not None:  # what came after that step is made again; until then it stands
                step, count = resumed
                before = [one for one in records[:count] if isinstance(one, RunRecord) or one.step <= step]
                records = [*before, *records[count:]]
            is_new, resumed = False, None
        records.append(record)
    if not any(isinstance(record, RunRecord) for record in records):
        raise EventsError(
            f"{path}: has no record of a run's start. Give the directory that ds_hybrid.observe.directory named."
        )
    return RunEvents(tuple(records), tuple(warnings))


@dataclass(frozen=True)
class RunTimelines:
    """The steps of which there are timelines, ascending.

    Attributes:
        lines: by step; the last of a step.
    """

    path: Path
    lines: Mapping[int, Line]
    warnings: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(self.lines))

    def read(self, step: int) -> TimelineRecord:
        """The timeline of a step.

        Raises:
            EventsError: there is none of that step, or its line is damaged.
        """
        if step not in self.lines:
            known = ", ".join(map(str, self.steps)) or "none"
            raise EventsError(f"{self.path}: has no timeline of step {step}. Steps that have one: {known}.")
        place = self.lines[step]
        with _opened(self.path) as file:
            file.seek(place.offset)
            record = _record(replace(place, text=file.readline()))
        assert isinstance(record, TimelineRecord)
        return record


def find_timelines(run_directory: str | Path, events: RunEvents | None = None) -> RunTimelines:
    """Of which of a run's steps there are timelines; none where the run wrote no such file.

    A timeline has the step and the time of its step record: one of a step that was made again, or of an earlier run in
    the directory, is passed over. Only the beginnings of the lines are looked at.

    Args:
        events: of the run, where they have been read already.

    Raises:
        EventsError: the directory has no events, or a line is damaged; the last one may be torn.
    """
    path = Path(run_directory) / TIMELINE_FILE
    if not path.exists():
        return RunTimelines(path, {})
    records = (read_events(run_directory) if events is None else events).steps
    made = {(record.step, record.time) for record in records}
    warnings: list[str] = []
    lines = {}
    for line in _lines(path, warnings):
        step, time = _step_and_time(line)
        if (step, time) in made:
            lines[step] = replace(line, text=b"")
    return RunTimelines(path, lines, tuple(warnings))


@dataclass(frozen=True)
class Line:
    """A whole line of a file.

    Attributes:
        number: from 1 on.
        offset: where it begins, in bytes.
        text: with its end; empty where it is yet to be read.
    """

    path: Path
    number: int
    offset: int
    text: bytes

    @property
    def place(self) -> str:
        return f"{self.path}:{self.number}"


def _lines(path: Path, warnings: list[str]) -> Iterator[Line]:
    """The lines of a file; adds a warning for a torn last line."""
    offset = 0
    with _opened(path) as file:
        for number, text in enumerate(file, start=1):
            line = Line(path, number, offset, text)
            offset += len(text)
            if text.endswith(b"\n"):
                yield line
            else:
                warnings.append(
                    f"{line.place}: the last line is not whole and was passed over; the run crashed while it was "
                    "written, or writes it now"
                )


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise EventsError(
            f"{path}: {error.strerror}. Give the directory that ds_hybrid.observe.directory named."
        ) from error


def _step_and_time(line: Line) -> tuple[int, float]:
    """Without reading the rest of the line, which holds all spans of all ranks."""
    head = _HEAD.match(line.text)
    if head is None:
        record = _record(line)
        return record.step, record.time
    return int(head[3]), float(head[2])


def _record(line: Line) -> AnyRecord:
    try:
        head = _HEAD.match(line.text)
        version = json.loads(line.text)["version"] if head is None else int(head[1])
        if version > SCHEMA_VERSION:
            raise EventsError(
                f"{line.place}: schema version {version}, this ds_hybrid reads up to {SCHEMA_VERSION}. Read it with "
                "the ds_hybrid that wrote it, or a later one."
            )
        return RECORDS.validate_json(line.text)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, EventsError):
            raise
        raise EventsError(
            f"{line.place}: damaged: {_what_is_wrong(error)}. Remove the line, or restore the file."
        ) from error


def _what_is_wrong(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
