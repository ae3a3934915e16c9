"""What charts are made of: an SVG that fills its frame, so that text keeps its size on a phone and lines its width.

Places are percentages of the plot; labels hang over its edges into the frame's margins. Colours are classes of
report.css, which has them for light and dark pages. Pure: numbers to markup.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ds_hybrid.observe.report.markup import Markup, element, join, percent
from ds_hybrid.observe.report.scales import Axis, axis, thinned, tick_labels

_MOST_POINTS: Final = 400
MOST_MARK_LINES: Final = 12
"""Marks of a chart that have a line from top to bottom; of more the lines would hide the chart."""


@dataclass(frozen=True)
class Line:
    """Values over steps; NaN leaves a gap. ``style`` is the number of its colour."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    style: int = 0


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    step: int
    kind: Literal["rebalance", "dispatcher"]
    text: str


def frame(*children: str | None, height: int, label: str, kind: str = "", readout: str | None = None) -> Markup:
    """A plot of ``height`` pixels and all the width there is.

    Args:
        label: what it shows, in a sentence, for those who do not see it.
        kind: a class of report.css that sets its margins.
        readout: the points of a line chart, which report.js reads out under the pointer.
    """
    drawing = element(
        "svg",
        *children,
        role="img",
        aria_label=label,
        width="100%",
        height=height,
        data_readout=readout,
    )
    return element("div", drawing, class_=f"plot {kind}".strip())


def step_axis(steps: Sequence[int]) -> Axis:
    """The axis of optimizer steps, from the first to the last."""
    return axis(map(float, steps), num_ticks=5, whole=True)


def x_labels(across: Axis, *, name: str, labels: Sequence[str] | None = None) -> Markup:
    """Ticks under a plot, and what they count."""
    texts = labels if labels is not None else tick_labels(across.ticks)
    ticks = [
        element("text", text, x=percent(at := across.at(tick)), y="100%", dy=17, class_="tick", text_anchor=_anchor(at))
        for tick, text in zip(across.ticks, texts, strict=True)
    ]
    return join(*ticks, element("text", name, x="100%", y="100%", dy=33, class_="axis-name", text_anchor="end"))


def y_grid(up: Axis, labels: Sequence[str] | None = None) -> Markup:
    """A faint line for every tick, with its value on the left."""
    texts = labels if labels is not None else tick_labels(up.ticks)
    return join(
        *(
            join(
                element(
                    "line", x1="0", x2="100%", y1=percent(1 - up.at(tick)), y2=percent(1 - up.at(tick)), class_="grid"
                ),
                element("text", text, x="0", dx=-8, y=percent(1 - up.at(tick)), dy=4, class_="tick", text_anchor="end"),
            )
            for tick, text in zip(up.ticks, texts, strict=True)
        )
    )


def mark_lines(marks: Sequence[Mark], across: Axis) -> Markup:
    """A thin upright line for each mark, with a small sign above the plot; of many marks the signs alone."""
    shown = {(mark.kind, round(across.at(mark.step), 2)): mark for mark in marks}
    with_lines = len(shown) <= MOST_MARK_LINES
    return join(*(_mark(mark, percent(across.at(mark.step)), with_line=with_lines) for mark in shown.values()))


def _mark(mark: Mark, x: str, *, with_line: bool) -> Markup:
    return element(
        "g",
        element("title", mark.text),
        element("line", x1=x, x2=x, y1="0", y2="100%") if with_line else None,
        element("text", "▾" if mark.kind == "rebalance" else "◇", x=x, y="0", dy=-2, text_anchor="middle"),
        class_=f"mark {mark.kind}",
    )


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    shown: Callable[[float], str],
    marks: Sequence[Mark] = (),
    holds: Sequence[float] = (),
    height: int = 170,
) -> Markup:
    """Lines over optimizer steps; a single record is a dot.

    Args:
        shown: a value as the read-out has it.
        holds: values that the upright axis must hold, such as 0.
    """
    across = step_axis([step for line in lines for step in line.steps] + [mark.step for mark in marks])
    up = axis([value for line in lines for value in line.values] + list(holds), from_zero=0.0 in holds)
    kept = [thinned(line.values, most=_MOST_POINTS) for line in lines]
    readout = [
        {
            "name": line.name if len(lines) > 1 else "",
            "points": [
                [line.steps[index], round(across.at(line.steps[index]), 4), shown(line.values[index])]
                for index in places
            ],
        }
        for line, places in zip(lines, kept, strict=True)
    ]
    return frame(
        y_grid(up),
        x_labels(across, name="optimizer step"),
        mark_lines(marks, across),
        *(_line(line, places, across, up) for line, places in zip(lines, kept, strict=True)),
        height=height,
        label=label,
        readout=json.dumps(readout, ensure_ascii=False, separators=(",", ":")),
    )


def _line(line: Line, places: Sequence[int], across: Axis, up: Axis) -> Markup:
    points = [(across.at(line.steps[index]), 1 - up.at(line.values[index]), line.values[index]) for index in places]
    path, drawing = [], False
    for x, y, value in points:
        if math.isfinite(value):
            path.append(f"{'L' if drawing else 'M'}{1000 * x:.1f} {1000 * y:.1f}")
        drawing = math.isfinite(value)
    curve = element(
        "svg",
        element("path", d="".join(path), vector_effect="non-scaling-stroke"),
        viewBox="0 0 1000 1000",
        preserveAspectRatio="none",
        width="100%",
        height="100%",
        overflow="visible",
    )
    known = [(x, y) for x, y, value in points if math.isfinite(value)]
    dots = known if len(known) <= 2 else known[-1:]
    return element(
        "g",
        curve,
        *(element("circle", cx=percent(x), cy=percent(y), r=3) for x, y in dots),
        class_=f"line line-{line.style}",
    )


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Classes of swatches and what they stand for."""
    items = [element("li", element("i", class_=f"swatch {kind}"), text) for kind, text in entries]
    return element("ul", *items, class_="legend")


def _anchor(at: float) -> str:
    return "start" if at < 0.02 else "end" if at > 0.98 else "middle"
