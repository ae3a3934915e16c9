"""Axes with round ticks, and numbers as people read them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

TIMES: Final = "\N{MULTIPLICATION SIGN}"
DASH: Final = "\N{EN DASH}"
"""Stands where there is no number."""

_PREFIXES: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Axis:
    """From a value to a place between 0 and 1.

    Attributes:
        low, high: the values at both ends, low < high.
        ticks: values to label, ascending, inside.
    """

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """0 at ``low``, 1 at ``high``; values outside are put on the edge."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def axis(values: Iterable[float], *, num_ticks: int = 4, from_zero: bool = False, whole: bool = False) -> Axis:
    """An axis that holds all finite values, its ends on round ticks unless ``whole``.

    Args:
        from_zero: begins at 0, whatever the smallest value.
        whole: values are steps: ticks are integers, and the ends are the first and the last value.
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    low = min(low, 0.0) if from_zero else low
    if high <= low:
        spare = 1.0 if whole or not low else abs(low) / 10
        low, high = (low if low == 0 and from_zero else low - spare), high + spare
    step = round_step((high - low) / (num_ticks + 1))
    if whole:
        step = max(step, 1.0)
        return Axis(low, high, _multiples(math.ceil(low / step), math.floor(high / step), step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = _multiples(first, last, step)
    return Axis(ticks[0], ticks[-1], ticks)


def round_step(step: float) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that is not below ``step`` > 0."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= step * (1 - 1e-9))


def _multiples(first: int, last: int, step: float) -> tuple[float, ...]:
    digits = max(0, -math.floor(math.log10(step)))
    return tuple(round(index * step, digits) for index in range(first, last + 1))


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Ticks with as many decimals as their distance needs, and thousands as k, millions as M and so on."""
    largest = max(map(abs, ticks), default=0.0)
    scale, prefix = next(((scale, prefix) for scale, prefix in _PREFIXES if largest >= max(scale, 1e4)), (1.0, ""))
    scaled = [tick / scale for tick in ticks]
    apart = min((b - a for a, b in pairwise(scaled)), default=1.0)
    digits = max(0, -math.floor(math.log10(apart) + 1e-9)) if apart > 0 else 0
    return [f"{value:,.{digits}f}{prefix}" if value else "0" for value in scaled]


def significant(value: float, digits: int = 3) -> str:
    """Rounded to so many digits, with thousands separated; a dash where there is no number."""
    if not math.isfinite(value):
        return DASH if math.isnan(value) else "\N{INFINITY}" if value > 0 else "-\N{INFINITY}"
    if value == 0:
        return "0"
    rounded = round(value, _decimals(value, digits))
    return f"{rounded:,.{max(_decimals(rounded, digits), 0)}f}"


def in_bytes(value: float) -> str:
    """Bytes with a decimal prefix: 5.91 kB, 1.20 MB."""
    if not math.isfinite(value):
        return significant(value)
    for scale, prefix in _PREFIXES:
        if abs(value) >= scale * 0.9995:
            return f"{significant(value / scale)} {prefix}B"
    return f"{value:.0f} B"


def in_seconds(value: float) -> str:
    """Seconds in the unit that fits: 340 µs, 12.5 ms, 3.20 s, 4 min 10 s."""
    if not math.isfinite(value):
        return significant(value)
    if abs(value) >= 120:
        minutes, seconds = divmod(round(value), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
    if abs(value) >= 1 or value == 0:
        return f"{significant(value)} s"
    return f"{significant(value * 1e3)} ms" if abs(value) >= 1e-3 else f"{significant(value * 1e6)} µs"


def in_utc(time: float) -> str:
    """Seconds since 1970 as a date and time: 2026-09-21 14:13 UTC."""
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"


def times(value: float) -> str:
    """A ratio: 1.92 and the multiplication sign."""
    return f"{value:.2f}{TIMES}" if math.isfinite(value) else significant(value)


def in_percent(fraction: float) -> str:
    """A fraction of one: 30 %, 4.1 %."""
    if not math.isfinite(fraction):
        return significant(fraction)
    return f"{100 * fraction:.0f} %" if abs(fraction) >= 0.0995 or fraction == 0 else f"{100 * fraction:.1f} %"


def thinned(values: Sequence[float], *, most: int) -> list[int]:
    """Places of the values to draw, about ``most``: of each stretch the lowest and the highest, and both ends."""
    if len(values) <= most:
        return list(range(len(values)))
    stretches = max(most // 2, 1)
    bounds = [index * len(values) // stretches for index in range(stretches + 1)]
    kept = {0, len(values) - 1}
    for first, last in pairwise(bounds):
        stretch = range(first, last)
        kept.add(min(stretch, key=values.__getitem__))
        kept.add(max(stretch, key=values.__getitem__))
    return sorted(kept)


def _decimals(value: float, digits: int) -> int:
    return digits - 1 - math.floor(math.log10(abs(value)))
