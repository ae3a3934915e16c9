"""Whole lines, whatever happened before."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_hybrid.errors import EventsError
from ds_hybrid.observe.events import EVENTS_FILE, TIMELINE_FILE
from ds_hybrid.observe.run_directory import find_timelines, read_events
from ds_hybrid.observe.writer import RecordWriter
from tests.observe.runs import run_record, step_record, timeline_record


def test_each_record_is_there_at_once_and_a_later_run_appends(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "1"
    writer = RecordWriter(folder)
    writer.write(run_record())
    assert read_events(folder).records == (run_record(),)
    writer.write(timeline_record(10))
    writer.close()
    writer = RecordWriter(folder)
    writer.write(step_record(10))
    writer.write(timeline_record(20))
    writer.close()
    assert read_events(folder).records == (run_record(), step_record(10))
    assert find_timelines(folder).steps == (10, 20)
    assert [len((folder / name).read_text().splitlines()) for name in (EVENTS_FILE, TIMELINE_FILE)] == [2, 2]


@pytest.mark.parametrize("torn", [b'{"version": 1, "kind": "st', b"x" * 200_000], ids=["short", "long"])
def test_what_a_crash_left_torn_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    writer = RecordWriter(tmp_path)
    writer.write(run_record())
    writer.close()
    with (tmp_path / EVENTS_FILE).open("ab") as file:
        file.write(torn)
    assert len(read_events(tmp_path).warnings) == 1
    writer = RecordWriter(tmp_path)
    writer.write(step_record(10))
    writer.close()
    read = read_events(tmp_path)
    assert (read.records, read.warnings) == ((run_record(), step_record(10)), ())


def test_a_file_that_is_torn_from_its_beginning_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_text('{"version"')
    writer = RecordWriter(tmp_path)
    writer.write(run_record())
    writer.close()
    assert read_events(tmp_path).records == (run_record(),)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EventsError, match=r'ds_hybrid\.observe\.directory = ".*file/runs": Not a directory: .*null\.'):
        RecordWriter(tmp_path / "file" / "runs")
    (tmp_path / "run" / EVENTS_FILE).mkdir(parents=True)
    with pytest.raises(EventsError, match="Is a directory"):
        RecordWriter(tmp_path / "run")
