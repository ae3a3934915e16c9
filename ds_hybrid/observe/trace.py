"""A step's timeline in the trace-event format, for https://ui.perfetto.dev and chrome://tracing. Pure.

The format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format"): complete
events ("X") of one thread must nest, times are microseconds, and metadata events ("M") name processes and threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ds_hybrid.observe.events import WAIT, RunRecord, Span, StepRecord, TimelineRecord

COMMUNICATION: Final = frozenset({"plan", "dispatch", "combine", "attention_gather", WAIT})
"""Names of spans that are exchanges with other ranks."""

_TRACKS: Final = ("model", "compute", "communication")


def to_trace(timeline: TimelineRecord, run: RunRecord, steps: Sequence[StepRecord] = ()) -> dict[str, Any]:
    """A track for each rank, which holds one for the whole model, one for what its layers compute and one for what they
    exchange. Works of one kind that overlap, as with chunks, get further ones.

    Args:
        steps: the run's records; they tell the bytes of each layer.
    """
    sent = _bytes_of_layers(timeline.step, steps)
    events: list[dict[str, Any]] = []
    for place, of_rank in enumerate(timeline.ranks):
        node = run.node_of_rank[of_rank.rank] if of_rank.rank < len(run.node_of_rank) else ""
        events.append(_named("process_name", of_rank.rank, 0, name=f"rank {of_rank.rank}"))
        events.append(_named("process_labels", of_rank.rank, 0, labels=node))
        events.append(_named("process_sort_index", of_rank.rank, 0, sort_index=of_rank.rank))
        events.extend(_of_rank(of_rank.rank, timeline.spans(place), sent))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "step": str(timeline.step),
            "model": run.model,
            "device": run.device,
            "world_size": str(run.world_size),
            **{f"version of {name}": version for name, version in run.versions.items()},
        },
    }


def _of_rank(rank: int, spans: Sequence[Span], sent: Mapping[str, int]) -> Iterable[dict[str, Any]]:
    tracks: dict[str, list[Span]] = {track: [] for track in _TRACKS}
    for span in spans:
        tracks[_track(span)].append(span)
    number = 0
    for track, on_it in tracks.items():
        for further, lane in enumerate(_nesting_lanes(on_it)):
            yield _named("thread_name", rank, number, name=track if not further else f"{track} {further + 1}")
            yield _named("thread_sort_index", rank, number, sort_index=number)
            yield from (_complete(span, rank, number, sent) for span in lane)
            number += 1


def _track(span: Span) -> str:
    if span.name in COMMUNICATION:
        return "communication"
    return "model" if span.layer is None else "compute"


def _nesting_lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans shared out so that two of one lane lie apart or one lies inside the other."""
    lanes: list[tuple[list[Span], list[int]]] = []
    for span in sorted(spans, key=lambda span: (_us(span.start), -_us(span.seconds))):
        start, end = _us(span.start), _us(span.start) + _us(span.seconds)
        for lane, open_ends in lanes:
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if not open_ends or end <= open_ends[-1]:
                lane.append(span)
                open_ends.append(end)
                break
        else:
            lanes.append(([span], [end]))
    return [lane for lane, _ in lanes]


def _complete(span: Span, rank: int, thread: int, sent: Mapping[str, int]) -> dict[str, Any]:
    arguments: dict[str, Any] = {"phase": span.phase}
    if span.layer is not None:
        arguments["layer"] = span.layer
        if span.name in ("dispatch", "combine") and span.layer in sent:
            arguments["layer_bytes_per_step_all_ranks"] = sent[span.layer]
    if span.exposed:
        arguments["exposed_us"] = _us(span.exposed)
    return {
        "name": span.name.replace("_", " "),
        "cat": span.phase,
        "ph": "X",
        "ts": _us(span.start),
        "dur": _us(span.seconds),
        "pid": rank,
        "tid": thread,
        "args": arguments,
    }


def _named(kind: str, rank: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "pid": rank, "tid": thread, "args": arguments}


def _bytes_of_layers(step: int, steps: Sequence[StepRecord]) -> dict[str, int]:
    """Mean bytes of a step that each layer sent, forward and backward, by the record that the step belongs to."""
    for record in steps:
        if record.step - record.num_steps < step <= record.step:
            return {layer.name: sum(layer.wire_bytes.values()) // record.num_steps for layer in record.layers}
    return {}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
