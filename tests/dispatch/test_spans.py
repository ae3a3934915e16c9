"""Notes of works: their order, phases, pauses, waits, and the way back through marks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_hybrid.dispatch import spans
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.spans import SILENT, LayerSpans, SpanLog
from ds_hybrid.dispatch.steps import Steps
from ds_hybrid.dispatch.stopwatch import Stopwatch


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> SpanLog:
    """Of a clock that counts how often it was looked at."""
    ticks = iter(range(1000))
    monkeypatch.setattr(spans, "instant", lambda: next(ticks))
    return SpanLog()


def told(log: SpanLog) -> list[tuple[str, str, int, int, int]]:
    return [(note.name, note.phase, note.layer, note.begin, note.end) for note in log.notes]


def three_steps(log: list[str]) -> Steps[int]:
    try:
        log.append("departs")
        yield
        log.append("arrives")
        yield
        return 7
    finally:
        log.append("closed")


def test_a_work_is_noted_between_each_two_of_its_pauses(log: SpanLog) -> None:
    done: list[str] = []
    work = LayerSpans(log, 3).steps("dispatch", three_steps(done))
    next(work)
    assert told(log) == [("dispatch", "forward", 3, 0, 1)]
    next(work)
    with pytest.raises(StopIteration) as end:
        next(work)
    assert end.value.value == 7
    assert told(log) == [("dispatch", "forward", 3, at, at + 1) for at in (0, 2, 4)]
    assert done == ["departs", "arrives", "closed"]


def test_a_work_that_is_closed_at_a_pause_is_closed_inside_too(log: SpanLog) -> None:
    done: list[str] = []
    work = LayerSpans(log, 0).steps("dispatch", three_steps(done))
    next(work)
    work.close()
    assert done == ["departs", "closed"]


def test_waits_lie_inside_works_and_the_watch_runs(log: SpanLog) -> None:
    watch, layer = Stopwatch(), LayerSpans(log, 1)
    with layer.work("combine"), layer.waiting(watch):
        pass
    assert told(log) == [("wait", "forward", 1, 1, 2), ("combine", "forward", 1, 0, 3)]
    assert watch.total() > 0


def through(tokens: Tensor, layer: spans.Spans) -> Tensor:
    trail = layer.trail()
    tokens = trail.mark(tokens, ends="dispatch") * 2
    with layer.work("experts"):
        tokens = trail.mark(tokens, ends="experts", begins="dispatch") * 3
    return trail.mark(trail.mark(tokens, ends="combine", begins="experts") * 5, begins="combine")


def test_backward_is_seen_through_marks_which_change_no_gradient(log: SpanLog) -> None:
    tokens = torch.ones(2, requires_grad=True)
    through(tokens, LayerSpans(log, 0)).sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.tolist() == [30.0, 30.0]
    assert [(name, phase) for name, phase, *_ in told(log)] == [
        ("experts", "forward"),
        ("combine", "backward"),
        ("experts", "backward"),
        ("dispatch", "backward"),
    ]
    assert all(note.begin < note.end for note in log.notes)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_forward_that_is_repeated_is_told_apart(log: SpanLog, use_reentrant: bool) -> None:
    tokens = torch.ones(2, requires_grad=True)
    layer = LayerSpans(log, 0)
    output: Tensor = checkpoint(lambda x: through(x, layer).sin(), tokens, use_reentrant=use_reentrant)
    output.sum().backward()
    phases = [phase for name, phase, *_ in told(log) if name == "experts"]
    assert phases[:2] == ["forward", "recompute"]
    assert phases[2:] == ["backward"]


def test_a_meter_shows_training_alone() -> None:
    meter, log = Meter(), SpanLog()
    meter.watched_by = LayerSpans(log, 0)
    meter.begin(training=False)
    assert meter.spans is SILENT
    meter.begin(training=True)
    with meter.exposed:
        pass
    assert [note.name for note in log.notes] == ["wait"]


def test_nothing_is_noted_where_nobody_watches() -> None:
    tokens = torch.ones(2, requires_grad=True)
    assert SILENT.trail().mark(tokens, ends="dispatch") is tokens
    work: Iterator[None] = three_steps([])
    assert SILENT.steps("dispatch", work) is work  # type: ignore[arg-type]
