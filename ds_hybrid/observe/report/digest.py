"""From a run's records to what the report shows of it. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Final

import numpy as np

from ds_hybrid.observe.events import (
    DispatcherRecord,
    LayerFacts,
    LayerStep,
    Record,
    ResumeRecord,
    RunRecord,
    StepRecord,
    TimelineRecord,
)
from ds_hybrid.observe.report.advice import advice_for
from ds_hybrid.observe.report.facts import facts_of
from ds_hybrid.observe.report.placements import LayerHistory, histories
from ds_hybrid.observe.report.plot import Line, Mark
from ds_hybrid.observe.report.scales import in_percent, in_utc, significant, times
from ds_hybrid.observe.report.view import (
    LayerView,
    RankTimeline,
    RebalanceView,
    RunView,
    StepView,
    WireView,
    mean,
)
from ds_hybrid.observe.run_directory import RunEvents

_OUTCOMES: Final = {
    "moved": "moved",
    "dry_run": "dry run",
    "too_costly": "costs too much",
    "stays": "stays",
    "failed": "failed",
    "off": "switched off",
    "called": "moved by a call",
}
_MOST_RECORDS_BESIDE_A_MOVE: Final = 5


def view_of(events: RunEvents, *, name: str, timeline: TimelineRecord | None, timeline_steps: Sequence[int]) -> RunView:
    """The view of a run.

    Args:
        events: what :func:`settled` leaves of them.
        name: of the run, as its directory is called.
        timeline: of the step that is to be drawn.
        timeline_steps: all steps that have a timeline.
    """
    run, places, records = events.run, histories(events.records), _loaded(events.steps)
    layers = tuple(
        _layer_view(facts, records[facts.name], events, run, places[facts.name])
        for facts in run.layers
        if facts.name in records
    )
    step = None if timeline is None else _step_view(timeline, events.run_of(timeline.step), timeline_steps)
    return RunView(
        name=name,
        facts=facts_of(events),
        lines=_lines(events.steps),
        layers=layers,
        rebalances=_rebalances(events, places, layers),
        num_looks=sum(record.action != "called" for record in events.rebalances),
        marks=_all_marks(events),
        nodes=run.node_of_rank,
        attention_bytes=sum(record.attention.wire_bytes for record in events.steps if record.attention is not None),
        step=step,
        advice=advice_for(events, layers, step),
    )


def settled(events: RunEvents) -> RunEvents:
    """Those of one model up to the start that made the last steps, without starts that came to nothing. What is left
    out at the end and of other models is told as a warning."""
    warnings, starts = list(events.warnings), _starts(events)
    shown = events.runs.index(events.run)
    idle = events.runs[shown + 1 :]
    if idle:
        which = f"the run that began in this directory at {in_utc(idle[-1].time)} has"
        if len(idle) > 1:
            which = f"the last {len(idle)} runs that began in this directory, from {in_utc(idle[0].time)} on, have"
        warnings.append(f"{which} no step yet; the one before {'it' if len(idle) == 1 else 'them'} is shown")
    kept = [start for start in starts[:shown] if not all(isinstance(each, RunRecord | ResumeRecord) for each in start)]
    kept.append(starts[shown])
    others = [place for place, start in enumerate(kept) if _experts(start) != _experts(kept[-1])]
    if others:
        kept = kept[others[-1] + 1 :]
        warnings.append(
            f"what was written here before {in_utc(kept[0][0].time)} is of other layers or experts, and left out"
        )
    return RunEvents(tuple(chain.from_iterable(kept)), tuple(warnings))


def _starts(events: RunEvents) -> list[tuple[Record, ...]]:
    """The records from each start to the next one."""
    places = [place for place, record in enumerate(events.records) if isinstance(record, RunRecord)]
    return [events.records[first:last] for first, last in pairwise([*places, len(events.records)])]


def _experts(start: Sequence[Record]) -> dict[str, int]:
    """How many each layer has, of the records of a start."""
    run = start[0]
    assert isinstance(run, RunRecord)
    return {layer.name: layer.num_experts for layer in run.layers}


def _loaded(steps: Sequence[StepRecord]) -> dict[str, list[tuple[StepRecord, LayerStep]]]:
    """By layer, the records in which tokens came to it."""
    found: dict[str, list[tuple[StepRecord, LayerStep]]] = {}
    for record in steps:
        for layer in record.layers:
            if any(layer.load):
                found.setdefault(layer.name, []).append((record, layer))
    return found


def _layer_view(
    facts: LayerFacts,
    records: Sequence[tuple[StepRecord, LayerStep]],
    events: RunEvents,
    run: RunRecord,
    history: LayerHistory,
) -> LayerView:
    name, laid_out, last = facts.name, history.laid_out, history.changes[-1].slots
    groups = next(
        (of.ep_groups for of in run.expert_groups if of.ep_size == len(last)),
        ((0,),) if run.world_size == 1 else (),
    )
    loads = np.array([layer.load for _, layer in records], dtype=np.int64)
    steps, num_steps = (
        np.array(each, dtype=np.int64) for each in zip(*((of.step, of.num_steps) for of, _ in records), strict=True)
    )
    return LayerView(
        name=name,
        steps=tuple(steps.tolist()),
        num_steps=tuple(num_steps.tolist()),
        loads=loads,
        rank_spread=tuple(history.rank_spread(loads, steps - num_steps, steps).tolist()),
        wire=_wire([layer for _, layer in records], facts.top_k),
        mode=records[-1][1].mode,
        marks=_marks_of(name, events),
        first_slots=laid_out.slots,
        first_step=laid_out.step,
        last_slots=last,
        group=groups[0] if groups else (),
        num_groups=max(len(groups), 1),
    )


def _wire(layers: Sequence[LayerStep], top_k: int) -> WireView:
    """Of one layer in all its records."""
    by_mode: Counter[str] = Counter()
    for layer in layers:
        by_mode.update(layer.wire_bytes)
    return WireView(
        sent=by_mode.total(),
        lower_bound=sum(layer.lower_bound for layer in layers),
        num_tokens=sum(sum(layer.load) for layer in layers) // top_k,
        by_mode=dict(by_mode),
    )


def _marks_of(layer: str, events: RunEvents) -> tuple[Mark, ...]:
    marks = [
        Mark(record.step, "rebalance", f"step {record.step}: experts moved")
        for record in events.rebalances
        if layer in record.placements
    ]
    marks += [
        Mark(record.step, "dispatcher", f"step {record.step}: {record.before} to {record.after}; {record.reason}")
        for record in events.dispatchers
        if record.layer == layer
    ]
    return tuple(sorted(marks, key=lambda mark: mark.step))


def _all_marks(events: RunEvents) -> tuple[Mark, ...]:
    marks = [
        Mark(record.step, "rebalance", f"step {record.step}: {record.num_moved} experts moved")
        for record in events.rebalances
        if record.placements
    ]
    changes: dict[int, list[DispatcherRecord]] = {}
    for record in events.dispatchers:
        changes.setdefault(record.step, []).append(record)
    marks += [
        Mark(step, "dispatcher", f"step {step}: {', '.join(f'{one.layer} to {one.after}' for one in records[:4])}")
        for step, records in changes.items()
    ]
    return tuple(sorted(marks, key=lambda mark: mark.step))


def _lines(steps: Sequence[StepRecord]) -> dict[str, tuple[Line, ...]]:
    def line(name: str, value: Callable[[StepRecord], float | None], style: int = 0) -> Line:
        found = [value(record) for record in steps]
        values = tuple(float("nan") if one is None else float(one) for one in found)
        return Line(name, tuple(record.step for record in steps), values, style)

    lines = {
        "loss": (line("loss", lambda record: record.loss),),
        "tokens_per_second": (line("tokens per second", lambda record: record.tokens_per_second),),
        "exposed": (
            line("MoE layers", lambda record: record.exposed_fraction),
            line("attention", lambda record: record.attention.exposed_fraction if record.attention else None, 1),
        ),
        "lower_bound_ratio": (line("bytes over the bound", lambda record: record.lower_bound_ratio),),
        "memory": (
            line("host, largest rank", lambda record: max(record.host_memory, default=None)),
            line("accelerator, largest rank", lambda record: max(record.accelerator_memory or (), default=None), 1),
        ),
        "nvlink": (line("busiest GPU's links", _busiest_links),),
    }
    drawn = {name: tuple(one for one in each if np.isfinite(one.values).any()) for name, each in lines.items()}
    return {name: each for name, each in drawn.items() if each}


def _busiest_links(record: StepRecord) -> float | None:
    return max((gpu.fraction for gpu in record.nvlink if gpu.fraction is not None), default=None)


def _rebalances(
    events: RunEvents, places: Mapping[str, LayerHistory], layers: Sequence[LayerView]
) -> tuple[RebalanceView, ...]:
    views = {layer.name: layer for layer in layers}
    order = {layer.name: number for number, layer in enumerate(events.run.layers)}
    gains = {(gain.layer, gain.moved_at): gain.measured for gain in events.gains}
    rows = []
    for number, record in enumerate(events.rebalances):
        decided = {decision.layer: decision for decision in record.decisions}
        told = {*record.placements, *(one.layer for one in record.decisions if one.num_moved)}
        for layer in sorted(told, key=order.__getitem__):
            decision = decided.get(layer)
            moved = layer in record.placements
            measures = moved and layer in views
            before, after = _measured(record.step, views[layer], places[layer]) if measures else (None, None)
            outcome = _OUTCOMES[record.action]
            if decision is not None and not moved and not decision.pays:
                outcome = "does not pay"
            rows.append(
                RebalanceView(
                    step=record.step,
                    layer=layer,
                    outcome=outcome,
                    reason=record.reason if decision is None else decision.reason,
                    num_moved=places[layer].num_moved.get(number, 0) if decision is None else decision.num_moved,
                    predicted_before=None if decision is None else decision.load_before,
                    predicted_after=None if decision is None else decision.load_after,
                    measured_before=before,
                    measured_after=after,
                    predicted_gain=None if decision is None else decision.predicted_gain,
                    measured_gain=gains.get((layer, record.step)) if moved else None,
                    cost=None if decision is None else decision.predicted_cost,
                )
            )
    return tuple(rows)


def _measured(step: int, layer: LayerView, history: LayerHistory) -> tuple[float | None, float | None]:
    """The mean spread of the records on both sides of a move that lie whole between it and its neighbours."""
    changes = history.changes
    place = next((place for place, change in enumerate(changes) if place and change.step == step), None)
    if place is None:
        return None, None
    earliest = changes[place - 1].step
    latest = changes[place + 1].step if place + 1 < len(changes) else math.inf
    last = np.array(layer.steps)
    first, spreads = last - np.array(layer.num_steps), np.array(layer.rank_spread)
    before = spreads[(first >= earliest) & (last <= step)][-_MOST_RECORDS_BESIDE_A_MOVE:]
    after = spreads[(first >= step) & (last <= latest)][:_MOST_RECORDS_BESIDE_A_MOVE]
    return (mean(before.tolist()) if before.size else None), (mean(after.tolist()) if after.size else None)


def _step_view(timeline: TimelineRecord, run: RunRecord, steps: Sequence[int]) -> StepView:
    nodes = run.node_of_rank
    ranks = tuple(
        RankTimeline(of.rank, nodes[of.rank] if of.rank < len(nodes) else "", timeline.spans(place))
        for place, of in enumerate(timeline.ranks)
    )
    return StepView(timeline.step, timeline.seconds, ranks, tuple(steps))


def headline(view: RunView) -> list[tuple[str, str, str]]:
    """The run in a few figures: name, value and what it is compared with."""
    found = []
    loss = _known(view, "loss")
    if loss:
        found.append(("Loss", significant(loss[-1], 4), f"from {significant(loss[0], 4)}" if len(loss) > 1 else ""))
    speed = _known(view, "tokens_per_second")
    if speed:
        found.append(("Tokens per second", significant(float(np.median(speed))), "median, pauses left out"))
    ratio = _known(view, "lower_bound_ratio")
    if ratio:
        found.append(("Wire bytes", times(ratio[-1]), "the lower bound"))
    spreads = [layer.late_spread() for layer in view.layers if len(layer.last_slots) > 1]
    if spreads and np.isfinite(spreads).any():
        found.append(("Busiest rank", times(float(np.nanmax(spreads))), "its layer's mean load"))
    exposed = _known(view, "exposed")
    if exposed:
        in_attention = mean([value for line in view.lines["exposed"][1:] for value in line.values])
        beside = (
            f"of time; attention's {in_percent(in_attention)}" if math.isfinite(in_attention) else "of the ranks' time"
        )
        found.append(("Exposed communication", in_percent(mean(exposed)), beside))
    moves = [row for row in view.rebalances if row.measured_after is not None or row.outcome.startswith("moved")]
    if view.num_looks or moves:
        num_steps = len({row.step for row in moves})
        beside = f"at {num_steps} step{'' if num_steps == 1 else 's'}"
        found.append(("Experts moved", f"{sum(row.num_moved for row in moves):,}", beside))
    return found


def _known(view: RunView, name: str) -> list[float]:
    return [value for line in view.lines.get(name, ())[:1] for value in line.values if np.isfinite(value)]
