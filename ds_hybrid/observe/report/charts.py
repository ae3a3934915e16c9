"""The report's charts: loads as heatmaps, bytes as bars, a step as a timeline, places as a grid. Numbers to markup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ds_hybrid.observe.events import Span
from ds_hybrid.observe.report.markup import Markup, element, percent
from ds_hybrid.observe.report.palette import kind_class
from ds_hybrid.observe.report.pixels import picture, place_of, scale_colours
from ds_hybrid.observe.report.plot import frame, mark_lines, x_labels
from ds_hybrid.observe.report.scales import TIMES, Axis, axis, in_bytes, in_percent, in_seconds, times
from ds_hybrid.observe.report.view import FloatArray, LayerView, RankTimeline, StepView, relative, spread
from ds_hybrid.observe.trace import COMMUNICATION

_MOST_COLUMNS: Final = 96
_MOST_SPANS: Final = 8000
_LANE: Final = 34
_LEAST_WIDTH: Final = 650
_MOST_WIDTH: Final = 8000
_WIDTH_OF_A_SPAN: Final = 3


def highest_load(layers: Sequence[LayerView]) -> float:
    """The load over the mean at the bright end of the heatmaps' scale: round, and above all but a few cells."""
    cells = [layer.relative_loads[np.isfinite(layer.relative_loads)] for layer in layers]
    known = np.concatenate(cells) if cells else np.empty(0)
    return max(2.0, float(np.ceil(np.quantile(known, 0.998)))) if known.size else 2.0


def load_heatmap(layer: LayerView, *, highest: float) -> Markup:
    """Experts from top to bottom, steps from left to right."""
    across, columns = heatmap_columns(layer)
    up = Axis(0.0, float(layer.num_experts), ())
    every = max(1, round(layer.num_experts / 4))
    ticks = list(range(0, layer.num_experts, every))
    labels = [
        element(
            "text", str(expert), x="0", dx=-8, y=percent(up.at(expert + 0.5)), dy=4, class_="tick", text_anchor="end"
        )
        for expert in ticks
    ]
    image = element(
        "image",
        href=picture(columns.T, highest),
        x="0",
        y="0",
        width="100%",
        height="100%",
        preserveAspectRatio="none",
        class_="cells",
    )
    loads = layer.late_loads()
    hottest = int(loads.argmax())
    return frame(
        image,
        element("text", "expert", x="0", dx=-8, y="0", dy=-9, class_="axis-name", text_anchor="end"),
        *labels,
        x_labels(across, name="optimizer step"),
        mark_lines(layer.marks, across),
        height=min(max(4 * layer.num_experts, 128), 256),
        label=f"{layer.name}: load of {layer.num_experts} experts over {len(layer.steps)} records. At the end the "
        f"busiest is expert {hottest} with {times(spread(loads))} the mean.",
        kind="heatmap",
    )


def load_scale(highest: float) -> Markup:
    """The colours of the heatmaps and what they mean."""
    colours = ", ".join(f"rgb({red} {green} {blue})" for red, green, blue in scale_colours(8))
    bar = element("div", class_="scale-bar", style=f"background: linear-gradient(90deg, {colours})")
    between = [(f"{value}{TIMES}", value) for value in (2, 4) if place_of(value, highest) < 0.6]
    ticks = [("0", 0), ("mean", 1), *between, (f"{highest:.0f}{TIMES} and more", highest)]
    labels = [
        element(
            "span",
            text,
            style=f"left: {percent(float(place_of(value, highest)))}",
            class_="first" if value == 0 else "last" if value == highest else "middle",
        )
        for text, value in ticks
    ]
    return element(
        "div",
        bar,
        element("div", *labels, class_="scale-ticks"),
        class_="scale",
        role="img",
        aria_label=f"Colours from dark, no load, to light yellow, {highest:.0f} times the mean load.",
    )


def heatmap_columns(layer: LayerView) -> tuple[Axis, FloatArray]:
    """The axis of steps and [columns, E] relative loads of equal stretches of it.

    A record counts for all the steps that it covers, in equal parts; a stretch without any is NaN.
    """
    ends, lengths = np.asarray(layer.steps, dtype=np.float64), np.asarray(layer.num_steps, dtype=np.float64)
    low, high = float(ends[0] - lengths[0]), float(ends[-1])
    count = min(_MOST_COLUMNS, max(1, round((high - low) / float(np.median(lengths)))))
    edges = np.linspace(low, high, count + 1)
    common = np.minimum(edges[1:, None], ends) - np.maximum(edges[:-1, None], ends - lengths)
    columns = relative(np.maximum(common, 0.0) / lengths @ layer.loads)
    return axis([low, high], num_ticks=5, whole=True), columns


def bytes_bars(layers: Sequence[LayerView]) -> Markup:
    """For each layer the bytes that a token cost, and a line where the lower bound is."""
    rows = []
    highest = max((layer.wire.bytes_per_token for layer in layers if layer.wire.num_tokens), default=0.0)
    for layer in layers:
        wire = layer.wire
        if not wire.num_tokens or not highest:
            continue
        bound = wire.lower_bound / wire.num_tokens
        bar = element(
            "svg",
            element("rect", x="0", y=3, width=percent(wire.bytes_per_token / highest), height=14, rx=2, class_="sent"),
            element("line", x1=percent(bound / highest), x2=percent(bound / highest), y1=0, y2=20, class_="bound"),
            role="img",
            aria_label=f"{layer.name}: {in_bytes(wire.bytes_per_token)} a token, the bound is {in_bytes(bound)}",
            width="100%",
            height=20,
        )
        rows.append(
            element(
                "div",
                element("span", layer.name, class_="bar-name", title=layer.name),
                element("span", layer.mode, class_="bar-mode"),
                element("div", bar, class_="bar-plot"),
                element("span", f"{in_bytes(wire.bytes_per_token)}", class_="bar-value"),
                element("strong", times(wire.ratio), class_="bar-value"),
                class_="bar-row",
            )
        )
    return element("div", *rows, class_="bars")


def drawn_ranks(step: StepView) -> tuple[RankTimeline, ...]:
    """The ranks whose spans fit on a page: all, or those that waited least and those that waited longest."""
    num_spans = sum(len(rank.spans) for rank in step.ranks)
    if num_spans <= _MOST_SPANS:
        return step.ranks
    count = max(2, _MOST_SPANS * len(step.ranks) // num_spans)
    by_waiting = sorted(step.ranks, key=lambda rank: rank.exposed)
    kept = {rank.rank for rank in (*by_waiting[: count // 2], *by_waiting[len(by_waiting) - (count - count // 2) :])}
    return tuple(rank for rank in step.ranks if rank.rank in kept)


def timeline(step: StepView) -> Markup:
    """A lane for each rank: what it computes above, what it exchanges below; hatched while it stood still."""
    ranks = drawn_ranks(step)
    milliseconds = 1e3 * step.seconds or 1.0
    width = min(max(_LEAST_WIDTH, _WIDTH_OF_A_SPAN * max(len(rank.of_layers) for rank in ranks)), _MOST_WIDTH)
    ticks = axis([0.0, milliseconds], num_ticks=max(8, width // 140), from_zero=True).ticks
    across = Axis(0.0, milliseconds, tuple(tick for tick in ticks if tick <= milliseconds))
    plot = frame(
        _hatch(),
        *(
            element("line", x1=percent(across.at(tick)), x2=percent(across.at(tick)), y1="0", y2="100%", class_="grid")
            for tick in across.ticks
        ),
        *(_lane(rank, number * _LANE, across) for number, rank in enumerate(ranks)),
        x_labels(across, name="milliseconds since the step began"),
        height=len(ranks) * _LANE,
        label=f"Timeline of step {step.step}: {len(ranks)} ranks, {in_seconds(step.seconds)}. Ranks stood still for "
        f"messages {in_percent(step.exposed_fraction)} of the time.",
        kind="lanes",
    )
    names = [
        element(
            "li", element("b", f"rank {rank.rank}"), element("span", rank.node), title=f"rank {rank.rank}, {rank.node}"
        )
        for rank in ranks
    ]
    return element(
        "div",
        element("ol", *names, class_="lane-names", style=f"--lane-height: {_LANE}px"),
        element(
            "div",
            element("div", plot, style=f"min-width: {width}px"),
            class_="scroll",
            tabindex="0",
            role="group",
            aria_label="Timeline, scrolls sideways",
        ),
        class_="timeline",
    )


def _lane(rank: RankTimeline, top: int, across: Axis) -> Markup:
    whole = [_span(span, top, 5, f"whole whole-{span.phase}", rank, across) for span in rank.whole_model]
    inside = [
        _span(span, top + (18 if span.name in COMMUNICATION else 6), 11, kind_class(span.name), rank, across)
        for span in rank.of_layers
    ]
    waiting = [_span(span, top + 18, 11, "waiting", rank, across) for span in rank.waits]
    ground = element("rect", x="0", y=top, width="100%", height=_LANE - 4, class_="lane")
    return element("g", ground, *whole, *inside, *waiting)


def _span(span: Span, top: int, height: int, kind: str, rank: RankTimeline, across: Axis) -> Markup:
    left, right = across.at(1e3 * span.start), across.at(1e3 * (span.start + span.seconds))
    words = [f"rank {rank.rank}", span.name.replace("_", " "), span.layer or "", in_seconds(span.seconds)]
    if span.exposed and kind != "waiting":
        words.append(f"{in_seconds(span.exposed)} of it waiting")
    return element(
        "rect",
        element("title", ", ".join(filter(None, words))),
        x=percent(left),
        width=percent(right - left),
        y=top,
        height=height,
        class_=f"span {kind}",
    )


def _hatch() -> Markup:
    lines = element("line", x1=0, y1=0, x2=0, y2=6, class_="hatch-line")
    ground = element("rect", width=6, height=6, class_="hatch-ground")
    return element(
        "defs",
        element(
            "pattern",
            ground,
            lines,
            id="waiting",
            width=6,
            height=6,
            patternUnits="userSpaceOnUse",
            patternTransform="rotate(45)",
        ),
    )


def placement_grid(layer: LayerView, nodes: Sequence[str]) -> Markup:
    """A box for each rank, by node, with its experts; those that came since the start are outlined."""
    loads = layer.late_loads().astype(np.float64)
    mean_expert, total = loads.mean(), loads.sum()
    by_node: dict[str, list[Markup]] = {}
    for place, experts in enumerate(layer.last_slots):
        rank = layer.group[place] if layer.group else place
        node = nodes[rank] if rank < len(nodes) else ""
        share = float(loads[list(experts)].sum() / total * len(layer.last_slots)) if total else float("nan")
        stayed = set(layer.first_slots[place])
        chips = [
            _chip(expert, loads[expert] / mean_expert if total else 0.0, expert not in stayed) for expert in experts
        ]
        box = element(
            "div",
            element("h5", f"rank {rank} ", element("span", f"{times(share)} the mean")),
            element("ul", *chips, class_="chips"),
            class_="rank-box",
        )
        by_node.setdefault(node, []).append(box)
    boxes = [
        element("section", element("h4", node or "one node"), element("div", *ranks, class_="ranks"), class_="node")
        for node, ranks in by_node.items()
    ]
    return element("div", *boxes, class_="placement")


def _chip(expert: int, load: float, came: bool) -> Markup:
    title = f"{times(load)} the mean" + (", moved here" if came else "")
    filled = f"--load: {min(25 * load, 100.0):.0f}%"
    return element("li", str(expert), style=filled, class_="came" if came else None, title=title)


def dumbbell(before: float, after: float, *, highest: float) -> Markup:
    """Spread before and after on one line, from 1 (even) to ``highest``."""
    scale = Axis(1.0, max(highest, 1.01), ())
    first, last = percent(scale.at(before)), percent(scale.at(after))
    return element(
        "svg",
        element("line", x1="0", x2="100%", y1=8, y2=8, class_="grid"),
        element("line", x1=first, x2=last, y1=8, y2=8, class_="way"),
        element("circle", cx=first, cy=8, r=4, class_="before"),
        element("circle", cx=last, cy=8, r=4, class_="after"),
        role="img",
        aria_label=f"from {times(before)} to {times(after)} the mean",
        width="100%",
        height=16,
    )
