"""What a run wrote down is read back: whole, torn, damaged, resumed, begun anew."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from ds_hybrid.errors import EventsError
from ds_hybrid.observe import run_directory
from ds_hybrid.observe.events import EVENTS_FILE, TIMELINE_FILE, RebalanceRecord, Record, ResumeRecord, StepRecord
from ds_hybrid.observe.run_directory import find_timelines, read_events
from tests.observe.runs import (
    BEGAN,
    LAYERS,
    MOVED,
    all_events,
    rebalance_record,
    run_record,
    step_record,
    timeline_record,
    write_lines,
    write_run,
)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    read = read_events(write_run(tmp_path))
    void = step_record(50, loss=99.0)
    assert read.records == tuple(record for record in all_events() if record != void)
    assert read.warnings == ()
    assert [record.step for record in read.steps] == [10, 20, 30, 40, 50, 60]
    assert len(read.runs) == 2
    assert read.resumes[0].placements[LAYERS[0]] == MOVED
    assert [(record.step, record.action) for record in read.rebalances] == [(30, "moved"), (60, "stays")]
    assert (read.gains[0].moved_at, read.dispatchers[0].after) == (30, "allgather")


def test_a_run_that_began_anew_in_the_directory_is_read_alone(tmp_path: Path) -> None:
    first = [run_record(), step_record(10), step_record(20)]
    second: list[Record] = [run_record(time=1.0), step_record(10, loss=1.0)]
    write_lines(tmp_path / EVENTS_FILE, [*first, run_record(time=0.5), *second])
    assert read_events(tmp_path).records == tuple(second)
    write_lines(tmp_path / EVENTS_FILE, [*first, second[0]])  # not clear yet whether it will be resumed
    assert read_events(tmp_path).records == (*first, second[0])


def test_a_checkpoint_that_is_loaded_at_the_end_voids_nothing(tmp_path: Path) -> None:
    """Later steps stand until they are made again."""
    run = [run_record(), *(step_record(step) for step in (10, 20, 30))]
    resume = ResumeRecord(time=2.0, step=10, path="run/global_step10", placements={})
    write_lines(tmp_path / EVENTS_FILE, [*run, resume])
    assert [record.step for record in read_events(tmp_path).steps] == [10, 20, 30]
    write_lines(tmp_path / EVENTS_FILE, [*run, resume, step_record(20, loss=1.0)])
    assert [(record.step, record.loss) for record in read_events(tmp_path).steps][1:] == [(20, 1.0)]


def test_numbers_that_json_lacks_survive_as_strict_json(tmp_path: Path) -> None:
    write_lines(tmp_path / EVENTS_FILE, [run_record(), step_record(10, loss=math.nan), step_record(20, loss=math.inf)])
    for line in (tmp_path / EVENTS_FILE).read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    first, second = read_events(tmp_path).steps
    assert math.isnan(first.loss or 0.0)
    assert second.loss == math.inf


def test_a_torn_last_line_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    path = write_run(tmp_path) / EVENTS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    read = read_events(tmp_path)
    assert [record.step for record in read.steps] == [10, 20, 30, 40, 50]
    assert [f"{path}:{len(whole.splitlines())}: the last line is not whole" in line for line in read.warnings] == [True]


def damaged(line: str) -> dict[str, str]:
    fields = json.loads(line)
    return {
        "not JSON": line[:30],
        "no object": "3",
        "no version": json.dumps({key: value for key, value in fields.items() if key != "version"}),
        "another kind": json.dumps(fields | {"kind": "stop"}),
        "a wrong type": json.dumps(fields | {"step": "ten"}),
        "a field is missing": json.dumps({key: value for key, value in fields.items() if key != "samples"}),
    }


@pytest.mark.parametrize("damage", damaged(step_record(10).to_line()))
def test_a_damaged_line_is_named(tmp_path: Path, damage: str) -> None:
    path = write_run(tmp_path) / EVENTS_FILE
    lines = path.read_text().splitlines()
    lines[1] = damaged(lines[1])[damage]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(EventsError, match=rf"^{re.escape(str(path))}:2: damaged: .*Remove the line"):
        read_events(tmp_path)


def test_a_later_schema_is_refused_and_unknown_fields_are_not(tmp_path: Path) -> None:
    path = write_run(tmp_path) / EVENTS_FILE
    lines = path.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"more": 1})
    path.write_text("\n".join(lines) + "\n")
    assert len(read_events(tmp_path).steps) == 6
    lines[2] = json.dumps(json.loads(lines[2]) | {"version": 2})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(EventsError, match=r"events\.jsonl:3: schema version 2, this ds_hybrid reads up to 1\."):
        read_events(tmp_path)


@pytest.mark.parametrize("lines", [None, [], [step_record(10)]], ids=["no file", "empty", "no start"])
def test_a_directory_without_a_run_is_refused(tmp_path: Path, lines: list[StepRecord] | None) -> None:
    if lines is not None:
        write_lines(tmp_path / EVENTS_FILE, lines)
    with pytest.raises(EventsError, match=r"events\.jsonl: .*Give the directory that ds_hybrid\.observe\.directory"):
        read_events(tmp_path)


def test_timelines_are_those_of_the_steps_that_count(tmp_path: Path) -> None:
    assert find_timelines(tmp_path).steps == ()
    run = [run_record(), *map(step_record, (10, 20, 30))]
    lines = [timeline_record(step) for step in (10, 20, 30)]
    write_lines(tmp_path / EVENTS_FILE, run)
    write_lines(tmp_path / TIMELINE_FILE, lines)
    assert find_timelines(tmp_path).steps == (10, 20, 30)

    resume = ResumeRecord(time=BEGAN + 90, step=10, path="run/global_step10", placements={})
    resumed = [*run, run_record(time=BEGAN + 80), resume, step_record(20, time=BEGAN + 100)]
    write_lines(tmp_path / EVENTS_FILE, resumed)
    assert find_timelines(tmp_path).steps == (10,)  # that of step 20 is still the lost one's

    again = timeline_record(20).model_copy(update={"time": BEGAN + 100, "seconds": 3.0})
    write_lines(tmp_path / TIMELINE_FILE, [*lines, again])
    found = find_timelines(tmp_path, read_events(tmp_path))
    assert found.steps == (10, 20)
    assert found.read(20) == again
    assert found.read(10) == lines[0]
    with pytest.raises(EventsError, match=r"no timeline of step 30\. Steps that have one: 10, 20\."):
        found.read(30)

    write_lines(tmp_path / EVENTS_FILE, [*resumed, run_record(time=BEGAN + 200), step_record(10, time=BEGAN + 210)])
    assert find_timelines(tmp_path).steps == ()  # begun anew, and no timeline yet


def test_timelines_are_found_without_reading_their_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    events = read_events(tmp_path)
    read: list[int] = []
    monkeypatch.setattr(run_directory, "_record", lambda line: read.append(line.number))
    assert find_timelines(tmp_path, events).steps == (10, 20, 30, 40, 50, 60)
    assert read == []


def test_timelines_that_others_wrote_and_torn_ones(tmp_path: Path) -> None:
    path = write_run(tmp_path) / TIMELINE_FILE
    lines = path.read_text().splitlines()
    fields = json.loads(lines[0])
    lines[0] = json.dumps({key: fields[key] for key in sorted(fields)}, indent=None)
    path.write_text("\n".join(lines)[:-20])
    found = find_timelines(tmp_path)
    assert found.steps == (10, 20, 30, 40, 50)
    assert found.read(10) == timeline_record(10)
    assert ["timeline.jsonl:6: the last line is not whole" in warning for warning in found.warnings] == [True]
    lines[1] = lines[1].replace('"ranks"', '"rank"')
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(EventsError, match=r"timeline\.jsonl:2: damaged: timeline\.ranks: Field required\. Remove"):
        find_timelines(tmp_path).read(20)
    lines[0] = "{}"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(EventsError, match=r"timeline\.jsonl:1: damaged: no version\."):
        find_timelines(tmp_path)


def test_which_start_made_a_step(tmp_path: Path) -> None:
    first, second = run_record(), run_record(time=1.0, world_size=8)
    resume = ResumeRecord(time=2.0, step=20, path="run/global_step20", placements={})
    resumed = [first, *map(step_record, (10, 20, 30)), second, resume]
    write_lines(tmp_path / EVENTS_FILE, resumed)
    assert read_events(tmp_path).run == first  # the second has made no step yet
    write_lines(tmp_path / EVENTS_FILE, [*resumed, step_record(30)])
    events = read_events(tmp_path)
    assert events.run == second
    assert [events.run_of(step) for step in (10, 15, 20, 21, 30, 31)] == [first] * 3 + [second] * 3
    write_lines(tmp_path / EVENTS_FILE, [first, second])
    assert read_events(tmp_path).run == second
    write_lines(tmp_path / EVENTS_FILE, [first, step_record(10), run_record(time=3.0, model="another")])
    assert read_events(tmp_path).run == first


def test_what_comes_before_a_resume_is_no_new_beginning(tmp_path: Path) -> None:
    moved = rebalance_record(time=1.5, step=0, action="called", decisions=())
    resume = ResumeRecord(time=2.0, step=20, path="run/global_step20", placements={})
    run = [run_record(), *map(step_record, (10, 20)), run_record(time=1.0), moved, resume, step_record(30)]
    write_lines(tmp_path / EVENTS_FILE, run)
    assert [record.step for record in read_events(tmp_path).steps] == [10, 20, 30]


def test_spans_of_a_rank_are_put_together_from_columns() -> None:
    spans = timeline_record(10).spans(1)
    starts = [span.start for span in spans]
    assert starts == sorted(starts)
    experts = [span for span in spans if span.name == "experts" and span.phase == "forward"]
    assert [(span.layer, span.seconds, span.exposed) for span in experts] == [(name, 0.006, 0.0) for name in LAYERS]
    assert {span.layer for span in spans if span.name in ("forward", "backward", "optimizer")} == {None}


def test_records_cannot_be_changed() -> None:
    record = RebalanceRecord(time=0.0, step=1, action="stays", reason="")
    with pytest.raises(ValueError, match="frozen"):
        record.step = 2  # type: ignore[misc]
