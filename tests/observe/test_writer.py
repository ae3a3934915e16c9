"""Whole lines, whatever happened before, and one writer at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
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
    for step in (10, 20):
        writer.write(step_record(step))
    writer.write(timeline_record(20))
    writer.close()
    assert read_events(folder).records == (run_record(), step_record(10), step_record(20))
    assert find_timelines(folder).steps == (10, 20)
    assert [len((folder / name).read_text().splitlines()) for name in (EVENTS_FILE, TIMELINE_FILE)] == [3, 2]


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


def test_a_directory_has_one_writer_at_a_time(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    os.write(writer._files[EVENTS_FILE], b'{"half a line')
    with pytest.raises(EventsError, match=rf'"{tmp_path}": another engine writes there now\. Give each its own'):
        RecordWriter(tmp_path)
    os.write(writer._files[EVENTS_FILE], b'":1}\n')  # nobody has cut it off
    assert (tmp_path / EVENTS_FILE).read_text() == '{"half a line":1}\n'
    writer.close()
    RecordWriter(tmp_path).close()


def test_a_worker_that_was_forked_meanwhile_holds_nothing_up(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    worker = os.fork()
    if worker == 0:
        signal.pause()
    try:
        writer.close()
        RecordWriter(tmp_path).close()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


WRITES = """
import multiprocessing, sys, time
from ds_hybrid.observe.writer import RecordWriter
writer = RecordWriter(sys.argv[1])
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
worker.start()
print(worker.pid, flush=True)
input()
"""


def test_another_process_is_refused_until_the_writer_dies_though_its_worker_lives(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        try:
            with pytest.raises(EventsError, match="another engine writes there now"):
                RecordWriter(tmp_path)
            process.kill()
            process.wait(timeout=30)
            RecordWriter(tmp_path).close()
            os.kill(worker, 0)  # it is still there
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_forked_worker_leaves_the_files_to_its_parent(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    gone = RecordWriter(tmp_path / "gone")
    gone.close()
    del gone
    worker = os.fork()
    if worker == 0:
        os._exit(len(writer._files))
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0
    writer.write(run_record())
    writer.close()
    assert read_events(tmp_path).records == (run_record(),)


def test_a_file_system_without_locks_serves_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
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
