"""What observing costs, from measured steps. Pure: no rank, no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WALL, CPU, INSIDE_WALL, INSIDE_CPU = range(4)
"""Measures of a step of one engine on one rank, in seconds: of the whole step, and inside the observer after it."""
NUM_MEASURES = 4
GOAL = 0.01
"""The part of training's time that observing may take."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ratio:
    """A median, and between which values it lies with a probability of 95 %; None for too few samples to tell."""

    median: float
    bounds: tuple[float, float] | None


@dataclass(frozen=True)
class Calls:
    """Of functions, that rank 0 makes in a recorded step and in the one before."""

    record: int
    other: int


@dataclass(frozen=True)
class Costs:
    """Of one engine. Ratios are to `off` in the same interval; of wall time the slowest rank's, of CPU time all ranks'.

    Attributes:
        step_ms: median over steps of the slowest rank.
        wall, cpu: of whole intervals.
        recorded_cpu: of the last step of each, which is recorded and drawn.
        between_cpu: of the others. None for an interval of one.
        record_ms, record_cpu_ms: median over records of the time inside the observer.
        other_ms, other_cpu_ms: the same at the ends of the other steps; 0 for an interval of one.
        of_interval: the wall time inside the observer in an interval, by these medians, over that of its steps.
        least_interval: the shortest at which that is below :data:`GOAL`; None: none is long enough.
    """

    step_ms: float
    wall: Ratio
    cpu: Ratio
    recorded_cpu: Ratio
    between_cpu: Ratio | None
    record_ms: float
    record_cpu_ms: float
    other_ms: float
    other_cpu_ms: float
    of_interval: float
    least_interval: int | None
    calls: Calls


def costs_of(measured: FloatArray, number: int, interval: int, calls: Calls) -> Costs:
    """The costs of one engine.

    Args:
        measured: [S, R, engines, measures], S whole intervals; the first engine is `off`.
        number: which engine; ``calls`` are its.
    """
    wall, cpu = (
        values.reshape(-1, interval, values.shape[1])  # [intervals, interval, engines]
        for values in (measured[..., WALL].max(1), measured[..., CPU].sum(1))
    )
    inside_wall = 1e3 * measured[:, :, number, INSIDE_WALL].max(1).reshape(-1, interval)
    inside_cpu = 1e3 * measured[:, :, number, INSIDE_CPU].sum(1).reshape(-1, interval)
    has_others = interval > 1
    record_ms, record_cpu_ms = (float(np.median(inside[:, -1])) for inside in (inside_wall, inside_cpu))
    other_ms, other_cpu_ms = (
        float(np.median(inside[:, :-1])) if has_others else 0.0 for inside in (inside_wall, inside_cpu)
    )
    step_ms_off = 1e3 * float(np.median(wall[..., 0]))
    return Costs(
        step_ms=1e3 * float(np.median(wall[..., number])),
        wall=_ratio(wall, number),
        cpu=_ratio(cpu, number),
        recorded_cpu=_ratio(cpu[:, -1:], number),
        between_cpu=_ratio(cpu[:, :-1], number) if has_others else None,
        record_ms=record_ms,
        record_cpu_ms=record_cpu_ms,
        other_ms=other_ms,
        other_cpu_ms=other_cpu_ms,
        of_interval=(record_ms + (interval - 1) * other_ms) / (interval * step_ms_off),
        least_interval=least_interval(record_ms, other_ms, step_ms_off),
        calls=calls,
    )


def _ratio(values: FloatArray, number: int) -> Ratio:
    sums = values.sum(1)
    return ratio(sums[:, number] / sums[:, 0])


def ratio(samples: FloatArray) -> Ratio:
    """The median of N ratios, and its bounds by their order alone. Fewer than six have none."""
    ordered = np.sort(samples)
    num = len(ordered)
    # The median lies below the k-th smallest with the probability of fewer than k heads in N throws.
    tails = np.cumsum([math.comb(num, heads) for heads in range(num)]) / 2.0**num
    outside = int(np.count_nonzero(tails <= (1 - 0.95) / 2))
    if not outside:
        return Ratio(float(np.median(ordered)), None)
    return Ratio(float(np.median(ordered)), (float(ordered[outside - 1]), float(ordered[-outside])))


def least_interval(record_ms: float, other_ms: float, step_ms: float) -> int | None:
    """The fewest steps between two records at which a record and the other steps' ends take less than the goal."""
    left = GOAL * step_ms - other_ms
    return max(1, math.floor((record_ms - other_ms) / left) + 1) if left > 0 else None


def is_resolved(found: Ratio, again: Ratio) -> bool:
    """Whether a ratio differs from 1 by more than chance, and by more than that of `again`, which is `off` too."""
    if found.bounds is None or found.bounds[0] <= 1 <= found.bounds[1]:
        return False
    return abs(found.median - 1) > abs(again.median - 1)


def to_markdown(costs: dict[str, Costs]) -> str:
    """One row for each engine. A ratio that is not resolved is shown by the bounds between which it lies."""
    lines = [
        "| engine | step ms | wall | CPU | CPU, recorded step | CPU, other steps | record ms | other ms "
        "| record CPU ms | of an interval | under 1 % from | calls, recorded step | calls, other steps |",
        "|---" * 13 + "|",
    ]
    off = costs["off"]
    for name, each in costs.items():
        cells = [
            f"`{name}`",
            f"{each.step_ms:.1f}",
            *(_cell(name, costs, field) for field in ("wall", "cpu", "recorded_cpu", "between_cpu")),
            f"{each.record_ms:.2f}",
            f"{each.other_ms:.3f}",
            f"{each.record_cpu_ms:.2f}",
            f"{each.of_interval:.3%}",
            "none" if each.least_interval is None else str(each.least_interval),
            *(
                str(mine) if name == "off" else f"{mine - its:+d}"
                for mine, its in ((each.calls.record, off.calls.record), (each.calls.other, off.calls.other))
            ),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(name: str, costs: dict[str, Costs], field: str) -> str:
    found, again = getattr(costs[name], field), getattr(costs["again"], field)
    if found is None:
        return ""
    if name == "off":
        return "1"
    if is_resolved(found, again):
        return f"{found.median:.3f}"
    return "not resolved" + ("" if found.bounds is None else ", {:.3f} to {:.3f}".format(*found.bounds))
