"""Spans of several ranks become one record, on one clock, and know how much of them was waiting; which are kept."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from ds_hybrid.observe.events import RECORDS, TimelineRecord
from ds_hybrid.observe.timeline import Timed, covered_within, is_kept, span_columns, timeline_record


def record_of(ranks: list[list[Timed]], layers: list[str], *, time: float = 0.0, step: int = 1) -> TimelineRecord:
    return timeline_record([span_columns(spans) for spans in ranks], layers, time=time, step=step)


def test_the_clock_begins_with_the_first_span_of_any_rank() -> None:
    ranks = [
        [Timed("router", "forward", 0, start=-0.5, seconds=0.1), Timed("forward", "forward", -1, -0.6, 0.4)],
        [Timed("experts", "backward", 1, start=-0.8, seconds=0.7)],
        [],
    ]
    record = record_of(ranks, ["a", "b"], time=3.0, step=7)
    assert (record.step, record.time, record.layers) == (7, 3.0, ("a", "b"))
    assert record.seconds == pytest.approx(0.7)
    assert [(s.name, s.phase, s.layer, s.start, s.seconds) for s in record.spans(0)] == [
        ("forward", "forward", None, pytest.approx(0.2), pytest.approx(0.4)),
        ("router", "forward", "a", pytest.approx(0.3), pytest.approx(0.1)),
    ]
    assert [(s.name, s.layer, s.start) for s in record.spans(1)] == [("experts", "b", 0.0)]
    assert record.spans(2) == ()


def test_waits_count_in_every_span_that_they_lie_in() -> None:
    ranks = [
        [
            Timed("wait", "forward", 0, 2.0, 1.0),
            Timed("wait", "forward", 0, 4.0, 0.5),
            Timed("combine", "forward", 0, 1.0, 3.0),
            Timed("router", "forward", 0, 0.0, 1.0),
            Timed("forward", "forward", -1, 0.0, 6.0),
        ]
    ]
    exposed = {(s.name, s.start): s.exposed for s in record_of(ranks, ["a"]).spans(0)}
    assert exposed == {
        ("wait", 2.0): 1.0,
        ("wait", 4.0): 0.5,
        ("combine", 1.0): 1.0,
        ("router", 0.0): 0.0,
        ("forward", 0.0): 1.5,
    }


def test_parts_of_waits_count_in_part() -> None:
    draw = np.random.default_rng(0)
    edges = np.sort(draw.uniform(0, 10, 20))
    wait_starts, wait_ends = edges[::2], edges[1::2]
    starts = draw.uniform(0, 10, 50)
    ends = starts + draw.uniform(0, 3, 50)
    by_hand = [
        sum(max(0.0, min(end, e) - max(start, s)) for s, e in zip(wait_starts, wait_ends, strict=True))
        for start, end in zip(starts, ends, strict=True)
    ]
    shuffled = draw.permutation(10)
    found = covered_within(starts, ends, wait_starts[shuffled], wait_ends[shuffled])
    assert found == pytest.approx(np.array(by_hand))


def test_no_spans_at_all() -> None:
    record = record_of([[], []], ["a"])
    assert (record.seconds, record.names, record.spans(1)) == (0.0, (), ())


def test_a_rank_sends_28_bytes_a_span_and_reads_what_it_sent() -> None:
    draw = np.random.default_rng(0)
    names = ("router", "dispatch", "wait")
    spans = [
        Timed(names[number % 3], "forward", number % 5, float(draw.uniform(-3, 0)), float(draw.uniform(0, 1e-3)))
        for number in range(3000)
    ]
    columns = span_columns(spans)
    arrays = (columns.name, columns.phase, columns.layer, columns.start_us, columns.us, columns.exposed_us)
    assert sum(array.nbytes for array in arrays) == 28 * len(spans)
    assert len(pickle.dumps(columns)) < 28.5 * len(spans)
    record = timeline_record([columns, columns], list("abcde"), time=0.0, step=1)
    assert RECORDS.validate_json(record.to_line()) == record
    expected = sorted((span.name, list("abcde")[span.layer], round(1e6 * span.seconds)) for span in spans)
    assert sorted((s.name, s.layer, round(1e6 * s.seconds)) for s in record.spans(1)) == expected


def test_timelines_get_rarer_as_a_run_gets_longer() -> None:
    kept = [number for number in range(1, 100_001) if is_kept(number)]
    assert kept[:100] == [*range(1, 101)]
    assert kept[100:192] == [*range(110, 1001, 10), 1100, 1200]
    assert len(kept) == 99 + 3 * 90 + 1
    latest = {number: max(each for each in kept if each <= number) for number in (109, 999, 12_345)}
    assert latest == {109: 100, 999: 990, 12_345: 12_000}
