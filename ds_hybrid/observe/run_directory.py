"""Reads what a run wrote down in its directory, also while it goes on or after it crashed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

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

    def run_of(self, step: int) -> RunRecord:
        """The start under which a step was made."""
        started = found = self.runs[0]
        for record in self.records:
            if isinstance(record, RunRecord):
                started = record
            elif isinstance(record, StepRecord):
                found = started
                if record.step >= step:
                    break
        return found

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
    for _, record in _lines(path, warnings):
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
    """The steps of which there are timelines, ascending, and where each lies in the file."""

    path: Path
    line_of_step: dict[int, int]
    warnings: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(self.line_of_step))

    def read(self, step: int) -> TimelineRecord:
        """The timeline of a step.

        Raises:
            EventsError: there is none of that step.
        """
        wanted = self.line_of_step.get(step)
        for number, record in _lines(self.path, []) if wanted is not None else ():
            if number == wanted:
                assert isinstance(record, TimelineRecord)
                return record
        known = ", ".join(map(str, self.steps)) or "none"
        raise EventsError(f"{self.path}: has no timeline of step {step}. Steps that have one: {known}.")


def find_timelines(run_directory: str | Path) -> RunTimelines:
    """Which steps of a run have timelines; none where the run wrote no such file.

    Raises:
        EventsError: a line is damaged; the last one may be torn.
    """
    path = Path(run_directory) / TIMELINE_FILE
    warnings: list[str] = []
    line_of_step: dict[int, int] = {}
    for number, record in _lines(path, warnings) if path.exists() else ():
        # A resumed run makes steps again.
        line_of_step = {step: line for step, line in line_of_step.items() if step < record.step}
        line_of_step[record.step] = number
    return RunTimelines(path, line_of_step, tuple(warnings))


def _lines(path: Path, warnings: list[str]) -> Iterator[tuple[int, AnyRecord]]:
    """The line numbers and records of a file; adds a warning for a torn last line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield number, _record(line, f"{path}:{number}")
                else:
                    warnings.append(
                        f"{path}:{number}: the last line is not whole and was passed over; the run crashed while it "
                        "was written, or writes it now"
                    )
    except OSError as error:
        raise EventsError(
            f"{path}: {error.strerror}. Give the directory that ds_hybrid.observe.directory named."
        ) from error


def _record(line: bytes, place: str) -> AnyRecord:
    try:
        fields = json.loads(line)
        version = fields["version"]
        if version > SCHEMA_VERSION:
            raise EventsError(
                f"{place}: schema version {version}, this ds_hybrid reads up to {SCHEMA_VERSION}. Read it with the "
                "ds_hybrid that wrote it, or a later one."
            )
        return RECORDS.validate_python(fields)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, EventsError):
            raise
        raise EventsError(
            f"{place}: damaged: {_what_is_wrong(error)}. Remove the line, or restore the file."
        ) from error


def _what_is_wrong(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
