"""From a run's records to what the report shows of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ds_hybrid.observe.events import (
    DispatcherRecord,
    LayerFacts,
    LayerStep,
    RebalanceRecord,
    ResumeRecord,
    RunRecord,
    StepRecord,
    TimelineRecord,
)
from ds_hybrid.observe.report.advice import advice_for
from ds_hybrid.observe.report.plot import Line, Mark
from ds_hybrid.observe.report.scales import in_percent, in_seconds, significant, times
from ds_hybrid.observe.report.view import (
    LayerView,
    RankTimeline,
    RebalanceView,
    RunView,
    StepView,
    WireView,
    mean,
    spread,
)
from ds_hybrid.observe.run_directory import RunEvents

Slots = tuple[tuple[int, ...], ...]

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
        name: of the run, as its directory is called.
        timeline: of the step that is to be drawn.
        timeline_steps: all steps that have a timeline.
    """
    run, places = events.runs[-1], placements(events)
    records = _loaded(events.steps)
    layers = tuple(
        _layer_view(facts, records[facts.name], events, run, places[facts.name])
        for facts in run.layers
        if facts.name in records
    )
    step = None if timeline is None else _step_view(timeline, run, timeline_steps)
    return RunView(
        name=name,
        facts=_facts(events),
        lines=_lines(events.steps),
        layers=layers,
        rebalances=_rebalances(events, places),
        num_looks=sum(record.action != "called" for record in events.rebalances),
        marks=_all_marks(events),
        nodes=run.node_of_rank,
        step=step,
        advice=advice_for(events, layers, step),
    )


def placements(events: RunEvents) -> dict[str, list[tuple[int, Slots]]]:
    """For each layer, from which step on its experts are where."""
    found: dict[str, dict[int, Slots]] = {}
    for record in events.records:
        changed: Mapping[str, Slots] = {}
        if isinstance(record, RunRecord):
            changed = {layer.name: layer.expert_of_slot for layer in record.layers}
        elif isinstance(record, ResumeRecord | RebalanceRecord):
            changed = record.placements
        for layer, slots in changed.items():
            found.setdefault(layer, {})[record.step] = slots
    return {layer: _changes(sorted(since.items())) for layer, since in found.items()}


def _changes(since: Sequence[tuple[int, Slots]]) -> list[tuple[int, Slots]]:
    """Without what repeats the placement before it, as the record of a resume does."""
    return [each for place, each in enumerate(since) if not place or each[1] != since[place - 1][1]]


def _placed_during(since: Sequence[tuple[int, Slots]], first: int, last: int) -> Slots:
    """Where experts were in most of the steps ``first`` + 1 to ``last``."""
    starts = [max(step, first) for step, _ in since] + [last]
    lasted = [max(min(after, last) - start, 0) for start, after in pairwise(starts)]
    return since[int(np.argmax(lasted))][1] if any(lasted) else since[0][1]


def rank_spread(load: Sequence[int] | npt.NDArray[np.int64], slots: Slots) -> float:
    """The busiest rank's pairs over the ranks' mean, for ``load`` [E] and experts ``slots`` [P, E/P]."""
    return spread(np.asarray(load)[np.asarray(slots)].sum(axis=1))


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
    since: Sequence[tuple[int, Slots]],
) -> LayerView:
    name = facts.name
    groups = next(
        (of.ep_groups for of in run.expert_groups if of.ep_size == len(since[0][1])),
        ((0,),) if run.world_size == 1 else (),
    )
    return LayerView(
        name=name,
        steps=tuple(record.step for record, _ in records),
        loads=np.array([layer.load for _, layer in records], dtype=np.int64),
        rank_spread=tuple(
            rank_spread(layer.load, _placed_during(since, record.step - record.num_steps, record.step))
            for record, layer in records
        ),
        wire=_wire([layer for _, layer in records], facts.top_k),
        mode=records[-1][1].mode,
        marks=_marks_of(name, events),
        first_slots=since[0][1],
        last_slots=since[-1][1],
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
        "exposed": (line("exposed communication", lambda record: record.exposed_fraction),),
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


def _rebalances(events: RunEvents, places: Mapping[str, Sequence[tuple[int, Slots]]]) -> tuple[RebalanceView, ...]:
    gains = {(gain.layer, gain.moved_at): gain.measured for gain in events.gains}
    rows = []
    for record in events.rebalances:
        decided = {decision.layer: decision for decision in record.decisions}
        for layer in sorted({*record.placements, *(one.layer for one in record.decisions if one.num_moved)}):
            decision = decided.get(layer)
            moved = layer in record.placements
            before, after = _measured(layer, record.step, events.steps, places[layer]) if moved else (None, None)
            outcome = _OUTCOMES[record.action]
            if decision is not None and not moved and not decision.pays:
                outcome = "does not pay"
            rows.append(
                RebalanceView(
                    step=record.step,
                    layer=layer,
                    outcome=outcome,
                    reason=record.reason if decision is None else decision.reason,
                    num_moved=_num_moved(record.step, places[layer]) if decision is None else decision.num_moved,
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


def _measured(
    layer: str, step: int, steps: Sequence[StepRecord], since: Sequence[tuple[int, Slots]]
) -> tuple[float | None, float | None]:
    """The mean spread of the records on both sides of a move that lie whole between it and its neighbours."""
    changes = [change for change, _ in since]
    if step not in changes:
        return None, None
    place = changes.index(step)
    earliest, latest = changes[place - 1] if place else 0, changes[place + 1] if place + 1 < len(changes) else None
    loads = [
        (record.step - record.num_steps, record.step, of.load)
        for record in steps
        for of in record.layers
        if of.name == layer and any(of.load)
    ]
    before = [load for first, last, load in loads if first >= earliest and last <= step]
    after = [load for first, last, load in loads if first >= step and (latest is None or last <= latest)]
    sides = (
        (before[-_MOST_RECORDS_BESIDE_A_MOVE:], since[place - 1][1] if place else since[0][1]),
        (after[:_MOST_RECORDS_BESIDE_A_MOVE], since[place][1]),
    )
    first, second = (mean([rank_spread(load, slots) for load in side]) if side else None for side, slots in sides)
    return first, second


def _num_moved(step: int, since: Sequence[tuple[int, Slots]]) -> int:
    place = next((place for place, (change, _) in enumerate(since) if change == step), 0)
    if not place:
        return 0
    return sum(len(set(new) - set(old)) for old, new in zip(since[place - 1][1], since[place][1], strict=True))


def _step_view(timeline: TimelineRecord, run: RunRecord, steps: Sequence[int]) -> StepView:
    nodes = run.node_of_rank
    ranks = tuple(
        RankTimeline(of.rank, nodes[of.rank] if of.rank < len(nodes) else "", timeline.spans(place))
        for place, of in enumerate(timeline.ranks)
    )
    return StepView(timeline.step, timeline.seconds, ranks, tuple(steps))


def _facts(events: RunEvents) -> tuple[tuple[str, str], ...]:
    run = events.runs[-1]
    config, ours = run.ds_config, _section(run.ds_config, "ds_hybrid")
    dispatch, rebalance = _section(ours, "dispatch"), _section(ours, "rebalance")
    nodes = list(dict.fromkeys(run.node_of_rank))
    where = f"on {nodes[0]}" if len(nodes) == 1 else f"on {len(nodes)} nodes ({', '.join(nodes[:4])}"
    if len(nodes) > 1:
        where += ", ...)" if len(nodes) > 4 else ")"
    wire_dtype = dispatch.get("wire_dtype", "auto")
    took = sum(record.seconds for record in events.steps)
    facts = [
        ("Model", f"{run.model}, {_layers_in_words(run)}"),
        ("Ranks", f"{run.world_size} {where}, {run.device}"),
        (
            "Parallelism",
            f"expert {', '.join(str(size) for size in sorted({layer.ep_size for layer in run.layers})) or 1}, "
            f"tensor {run.tp_size}, ZeRO {_section(config, 'zero_optimization').get('stage', 0)}",
        ),
        (
            "Dispatcher",
            dispatch.get("mode", "auto") + ("" if wire_dtype == "auto" else f", {wire_dtype} on the wire"),
        ),
        (
            "Rebalancing",
            f"{rebalance.get('algorithm', 'swap')}, every {rebalance.get('interval', 50)} steps"
            + (", dry run" if rebalance.get("dry_run") else "")
            if rebalance.get("enabled")
            else "off",
        ),
        ("Began", f"{datetime.fromtimestamp(events.runs[0].time, UTC):%Y-%m-%d %H:%M} UTC"),
        ("Training time", in_seconds(took)),
        ("Records", f"{len(events.steps)}, each of {_intervals(events.steps)}"),
    ]
    if events.resumes:
        facts.append(("Resumed", ", ".join(f"at step {resume.step}" for resume in events.resumes)))
    facts.append(("Versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())))
    return tuple((name, str(value)) for name, value in facts)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _layers_in_words(run: RunRecord) -> str:
    shapes = Counter((layer.num_experts, layer.top_k) for layer in run.layers)
    if not shapes:
        return "no MoE layers"
    return " and ".join(
        f"{count} MoE layer{'s' if count > 1 else ''} of {experts} experts, top-{top_k}"
        for (experts, top_k), count in shapes.items()
    )


def _intervals(steps: Sequence[StepRecord]) -> str:
    sizes = sorted({record.num_steps for record in steps})
    if not sizes:
        return "no steps yet"
    shown = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return f"{shown} step{'' if sizes == [1] else 's'}"


def headline(view: RunView) -> list[tuple[str, str, str]]:
    """The run in a few figures: name, value and what it is compared with."""
    found = []
    loss = _known(view, "loss")
    if loss:
        found.append(("Loss", significant(loss[-1], 4), f"from {significant(loss[0], 4)}" if len(loss) > 1 else ""))
    speed = _known(view, "tokens_per_second")
    if speed:
        found.append(("Tokens per second", significant(float(np.median(speed))), "median"))
    ratio = _known(view, "lower_bound_ratio")
    if ratio:
        found.append(("Wire bytes", times(ratio[-1]), "the lower bound"))
    spreads = [layer.late_spread() for layer in view.layers if len(layer.last_slots) > 1]
    if spreads and np.isfinite(spreads).any():
        found.append(("Busiest rank", times(float(np.nanmax(spreads))), "its layer's mean load"))
    exposed = _known(view, "exposed")
    if exposed:
        found.append(("Exposed communication", in_percent(mean(exposed)), "of the ranks' time"))
    moves = [row for row in view.rebalances if row.measured_after is not None or row.outcome.startswith("moved")]
    if view.num_looks or moves:
        num_steps = len({row.step for row in moves})
        beside = f"at {num_steps} step{'' if num_steps == 1 else 's'}"
        found.append(("Experts moved", str(sum(row.num_moved for row in moves)), beside))
    return found


def _known(view: RunView, name: str) -> list[float]:
    return [value for line in view.lines.get(name, ())[:1] for value in line.values if np.isfinite(value)]
