"""The trace of a step keeps the rules of the trace-event format and loses nothing."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from ds_hybrid.observe.events import RankSpans, TimelineRecord
from ds_hybrid.observe.trace import to_trace
from tests.observe.runs import LAYERS, run_record, step_record, timeline_record


def check_format(trace: dict[str, Any]) -> None:
    """The rules for JSON objects with metadata and complete events."""
    json.dumps(trace, allow_nan=False)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    named: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            key = {"process_name": "name", "process_labels": "labels", "thread_name": "name"}.get(
                event["name"], "sort_index"
            )
            assert set(event["args"]) == {key}
            named[event["name"]].add((event["pid"], event["tid"]))
        else:
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(threads) <= named["thread_name"]
    assert {pid for pid, _ in threads} == {pid for pid, _ in named["process_name"]}
    for spans in threads.values():
        open_ends: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "spans of one thread overlap and do not nest"
            open_ends.append(end)


def test_every_span_is_there() -> None:
    record = timeline_record(20)
    trace = to_trace(record, run_record(), [step_record(10), step_record(20)])
    check_format(trace)
    for rank in range(4):
        shown = sorted(
            (event["name"], event["ts"], event["dur"], event["args"]["phase"], event["args"].get("layer"))
            for event in trace["traceEvents"]
            if event["ph"] == "X" and event["pid"] == rank
        )
        spans = record.spans(rank)
        expected = [
            (span.name, round(1e6 * span.start), round(1e6 * span.seconds), span.phase, span.layer) for span in spans
        ]
        assert sorted(shown, key=str) == sorted(expected, key=str)


def test_bytes_are_those_of_a_step_of_the_layer() -> None:
    trace = to_trace(timeline_record(20), run_record(), [step_record(10), step_record(20)])
    sent = {
        (event["args"]["layer"], event["args"].get("layer_bytes_per_step_all_ranks"))
        for event in trace["traceEvents"]
        if event["name"] in ("dispatch", "combine")
    }
    assert sent == {(LAYERS[0], 90_000), (LAYERS[1], 100_000)}
    assert "layer_bytes" not in json.dumps(to_trace(timeline_record(20), run_record()))


def test_names_of_tracks() -> None:
    trace = to_trace(timeline_record(20), run_record())
    named = [(event["name"], event["pid"], event["args"]) for event in trace["traceEvents"] if event["ph"] == "M"]
    assert ("process_name", 2, {"name": "rank 2"}) in named
    assert ("process_labels", 2, {"labels": "node-b"}) in named
    tracks = [args["name"] for name, pid, args in named if name == "thread_name" and pid == 0]
    assert tracks == ["model", "compute", "communication"]


@pytest.mark.parametrize(("starts", "lanes"), [([0, 5], 2), ([0, 10], 1), ([0, 0], 1), ([0, 3, 6], 3)])
def test_chunks_that_overlap_get_a_track_each(starts: list[int], lanes: int) -> None:
    count = len(starts)
    columns = RankSpans(
        rank=0,
        name=(0,) * count,
        phase=(0,) * count,
        layer=(0,) * count,
        start_us=tuple(starts),
        us=(10,) * count,
        exposed_us=(0,) * count,
    )
    fields = {"seconds": 1e-3, "names": ("dispatch",), "phases": ("forward",), "layers": ("a",), "ranks": (columns,)}
    trace = to_trace(TimelineRecord(time=0, step=1, **fields), run_record())  # type: ignore[arg-type]
    check_format(trace)
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert sum(name.startswith("communication") for name in names) == lanes
