"""What rebalancing brought: steps of several engines on the same batches become windows, events and tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_hybrid.observe.run_directory import RunEvents

BASELINE = "off"
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Track:
    """What one engine did in S steps with L layers, P places of the expert-parallel group and R ranks.

    Attributes:
        loads: [S, L, P], the (token, choice) pairs that the experts of a place were given.
        expert_seconds: [S, L, P], how long they took in forward.
        wall, cpu: [S, R], seconds of the step by the clock and of this process.
        losses: [S], the mean of all ranks.
        num_moved: [S], the experts that changed their rank after the step.
        log: for each step, what the rebalancer said.
    """

    loads: FloatArray
    expert_seconds: FloatArray
    wall: FloatArray
    cpu: FloatArray
    losses: FloatArray
    num_moved: npt.NDArray[np.int64]
    log: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Balance:
    """How evenly something is spread over places, 1.0 and 0.0 being perfect.

    Attributes:
        max_over_mean: the busiest place over the mean, by layer over all steps, then the mean of the layers.
        spread: the largest distance from the mean as a fraction of it, averaged alike.
        total_max_over_mean: the busiest place over the mean, of the sum over layers.
        critical_path: sum over steps and layers of the busiest place over that of the means: what the experts of all
            layers take when each layer waits for its slowest place, over what they would take if even.
    """

    max_over_mean: float
    spread: float
    total_max_over_mean: float
    critical_path: float


@dataclass(frozen=True)
class Part:
    """One engine in one window. Times are milliseconds of a step; ratios are to the engine that never moves.

    Attributes:
        expert_ms: [P], forward of the experts, all layers together.
        layer_expert_ms: [L][P].
        wall_ms: median over steps of the slowest rank.
        cpu_ms: median of the sum over ranks.
        busiest_cpu_ms: median of the rank that computed longest: with a core for each rank no step is shorter.
        wall_ratio, cpu_ratio, busiest_cpu_ratio: medians over steps of the ratio in the same step.
        total_wall_ratio: of the sums over all steps, moves and all.
        loss_difference: the largest of a step.
    """

    load: Balance
    expert_time: Balance
    expert_ms: tuple[float, ...]
    layer_expert_ms: tuple[tuple[float, ...], ...]
    wall_ms: float
    cpu_ms: float
    busiest_cpu_ms: float
    wall_ratio: float
    cpu_ratio: float
    busiest_cpu_ratio: float
    total_wall_ratio: float
    num_moved: int
    loss: float
    loss_difference: float


@dataclass(frozen=True)
class Window:
    """Steps ``first`` to ``last``, counted from 1, by engine. ``domains``: those that dominated in it."""

    first: int
    last: int
    domains: tuple[str, ...]
    parts: Mapping[str, Part]


@dataclass(frozen=True)
class Event:
    """Experts moved after a step. Seconds, and seconds per step.

    Attributes:
        seconds: decision and moves, as the rebalancer timed them.
        predicted_seconds: of the moves alone.
        extra_seconds: the wall time of the step over the median of the engine's steps around it.
        rank_0_bytes: that rank 0 sent.
        predicted_gain: the rebalancer's forecast, all layers together.
        measured_gain: what it found later from the loads since; None for a layer that was not looked at again.
        layers: the names of those that moved.
    """

    engine: str
    step: int
    num_moved: int
    seconds: float
    predicted_seconds: float
    extra_seconds: float
    rank_0_bytes: int
    predicted_gain: float
    measured_gain: float | None
    layers: tuple[str, ...]


def balance(amounts: FloatArray) -> Balance:
    """Of [S, L, P] loads or seconds."""
    by_layer = amounts.sum(0)
    relative = by_layer / by_layer.mean(1, keepdims=True)
    total = by_layer.sum(0)
    return Balance(
        max_over_mean=float(relative.max(1).mean()),
        spread=float(np.abs(relative - 1).max(1).mean()),
        total_max_over_mean=float(total.max() / total.mean()),
        critical_path=float(amounts.max(2).sum() / amounts.mean(2).sum()),
    )


def window(tracks: Mapping[str, Track], first: int, last: int, domains: Sequence[str]) -> Window:
    """Steps ``first`` to ``last``, counted from 1, of all engines."""
    steps = slice(first - 1, last)
    return Window(
        first, last, tuple(domains), {name: _part(track, tracks[BASELINE], steps) for name, track in tracks.items()}
    )


def events(engine: str, run: RunEvents, track: Track) -> list[Event]:
    """The moves that a run wrote down, in order."""
    found = []
    for move in (record for record in run.rebalances if record.action == "moved"):
        layers = tuple(move.placements)
        gains = [gain.measured for gain in run.gains if gain.moved_at == move.step and gain.layer in layers]
        found.append(
            Event(
                engine,
                move.step,
                num_moved=move.num_moved,
                seconds=move.seconds or 0.0,
                predicted_seconds=move.predicted_seconds or 0.0,
                extra_seconds=_over_the_usual(track.wall.max(1), move.step - 1),
                rank_0_bytes=move.bytes_sent or 0,
                predicted_gain=sum(each.predicted_gain for each in move.decisions if each.layer in layers),
                measured_gain=sum(gains) if gains else None,
                layers=layers,
            )
        )
    return found


def to_json(windows: Sequence[Window], whole: Window | None, of_engines: Sequence[Event]) -> dict[str, Any]:
    """``whole`` is the part of the run in which nothing evens the load but moves."""
    return {
        "windows": [asdict(each) for each in windows],
        "without_balance_loss": None if whole is None else asdict(whole),
        "events": [asdict(each) for each in of_engines],
    }


def to_markdown(windows: Sequence[Window], whole: Window | None, of_engines: Sequence[Event]) -> str:
    """A table of windows and one of events."""
    lines = [_WINDOW_HEADER, _ruler(_WINDOW_HEADER)]
    for each in [*windows, *([whole] if whole else [])]:
        lines += [_window_row(each, name, part) for name, part in each.parts.items()]
    lines += ["", _EVENT_HEADER, _ruler(_EVENT_HEADER), *map(_event_row, of_engines)]
    return "\n".join(lines) + "\n"


_AROUND = 10

_WINDOW_HEADER = (
    "| steps | mostly | rebalance | busiest rank's load | spread | critical path | busiest rank's expert time "
    "| spread | critical path | wall ms | wall | with moves | CPU | busiest rank's CPU | moved | loss | difference |"
)
_EVENT_HEADER = (
    "| rebalance | after step | layers | moved | MB from rank 0 | took s | step longer by s | moves predicted s "
    "| gain predicted ms a step | measured |"
)


def _part(track: Track, baseline: Track, steps: slice) -> Part:
    seconds, wall, cpu = track.expert_seconds[steps], track.wall[steps], track.cpu[steps]
    base_wall, base_cpu = baseline.wall[steps], baseline.cpu[steps]
    mean_ms = 1e3 * seconds.mean(0)
    return Part(
        load=balance(track.loads[steps]),
        expert_time=balance(seconds),
        expert_ms=tuple(mean_ms.sum(0).tolist()),
        layer_expert_ms=tuple(map(tuple, mean_ms.tolist())),
        wall_ms=_median_ms(wall.max(1)),
        cpu_ms=_median_ms(cpu.sum(1)),
        busiest_cpu_ms=_median_ms(cpu.max(1)),
        wall_ratio=float(np.median(wall.max(1) / base_wall.max(1))),
        cpu_ratio=float(np.median(cpu.sum(1) / base_cpu.sum(1))),
        busiest_cpu_ratio=float(np.median(cpu.max(1) / base_cpu.max(1))),
        total_wall_ratio=float(wall.max(1).sum() / base_wall.max(1).sum()),
        num_moved=int(track.num_moved[steps].sum()),
        loss=float(track.losses[steps].mean()),
        loss_difference=float(np.abs(track.losses[steps] - baseline.losses[steps]).max()),
    )


def _median_ms(seconds: FloatArray) -> float:
    return 1e3 * float(np.median(seconds))


def _over_the_usual(seconds: FloatArray, step: int) -> float:
    around = np.delete(seconds, step)[max(step - _AROUND, 0) : step + _AROUND]
    return float(seconds[step] - np.median(around)) if len(around) else 0.0


def _ruler(header: str) -> str:
    return "|---" * (header.count("|") - 1) + "|"


def _window_row(of: Window, name: str, part: Part) -> str:
    load, spent = part.load, part.expert_time
    cells = [
        f"{of.first}-{of.last}",
        ", ".join(of.domains),
        f"`{name}`",
        *(f"{load.max_over_mean:.3f}", f"{load.spread:.1%}", f"{load.critical_path:.3f}"),
        *(f"{spent.max_over_mean:.3f}", f"{spent.spread:.1%}", f"{spent.critical_path:.3f}"),
        f"{part.wall_ms:.0f}",
        *(f"{part.wall_ratio:.3f}", f"{part.total_wall_ratio:.3f}"),
        *(f"{part.cpu_ratio:.3f}", f"{part.busiest_cpu_ratio:.3f}"),
        f"{part.num_moved}",
        *(f"{part.loss:.4f}", f"{part.loss_difference:.1e}"),
    ]
    return "| " + " | ".join(cells) + " |"


def _event_row(event: Event) -> str:
    gain = "-" if event.measured_gain is None else f"{1e3 * event.measured_gain:.1f}"
    cells = [
        f"`{event.engine}`",
        f"{event.step}",
        f"{len(event.layers)}",
        f"{event.num_moved}",
        f"{event.rank_0_bytes / 1e6:.1f}",
        *(f"{event.seconds:.2f}", f"{event.extra_seconds:.2f}", f"{event.predicted_seconds:.3f}"),
        f"{1e3 * event.predicted_gain:.1f}",
        gain,
    ]
    return "| " + " | ".join(cells) + " |"
