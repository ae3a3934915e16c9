"""The report as one HTML file that needs nothing else: no network, no fonts, no scripts but its own few lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Final

from ds_hybrid.observe.report import charts
from ds_hybrid.observe.report.digest import headline
from ds_hybrid.observe.report.markup import Markup, element, join
from ds_hybrid.observe.report.palette import kind_class, stylesheet
from ds_hybrid.observe.report.placements import moved_between
from ds_hybrid.observe.report.plot import Line, legend, line_chart
from ds_hybrid.observe.report.scales import DASH, TIMES, in_bytes, in_percent, in_seconds, significant, times
from ds_hybrid.observe.report.view import LayerView, RankTimeline, RebalanceView, RunView, StepView

_MOST_OPEN_LAYERS: Final = 12
_MOST_BARS: Final = 24
_MOST_ROWS: Final = 200
_MOST_OPEN_ROWS: Final = 24
_SEVERITIES: Final = {"problem": ("Problem", "problem"), "advice": ("Advice", "advice-item"), "note": ("Note", "note")}

LINE_CHARTS: Final[dict[str, tuple[str, Callable[[float], str], tuple[float, ...]]]] = {
    "loss": ("Loss", lambda value: significant(value, 4), ()),
    "tokens_per_second": ("Tokens per second", significant, (0.0,)),
    "exposed": ("Exposed communication, % of time", in_percent, (0.0,)),
    "lower_bound_ratio": ("Wire bytes over the lower bound", times, (1.0, 1.1)),
    "memory": ("Memory of the largest rank, GB", in_bytes, (0.0,)),
    "nvlink": ("Busiest GPU's NVLinks, % of speed", in_percent, (0.0,)),
}
"""For each name of :attr:`RunView.lines` its title, how its values read, and what its axis holds whatever
the values are."""

SCALES: Final = {"exposed": 100.0, "nvlink": 100.0, "memory": 1e-9}
"""What the axis of a chart shows for 1."""


def page(view: RunView) -> str:
    """The whole file."""
    sections = [
        ("summary", "Summary", _summary(view)),
        ("advice", "What to look at", _advice(view)),
        ("training", "Loss and throughput", _training(view)),
        ("load", "Expert load", _load(view)),
        ("timeline", "One step, rank by rank", _timeline(view.step)),
        ("bytes", "Bytes against the lower bound", _bytes(view)),
        ("rebalances", "Rebalances", _rebalances(view)),
        ("placement", "Where experts are", _placement(view)),
    ]
    links = element("nav", *(element("a", title, href=f"#{id_}") for id_, title, _ in sections), aria_label="Sections")
    header = element("header", element("h1", f"Run {view.name}"), links, class_="top")
    body = [
        element("section", element("h2", title, id=f"{id_}-title"), content, id=id_, aria_labelledby=f"{id_}-title")
        for id_, title, content in sections
    ]
    footer = element("footer", "Written by ds_hybrid report from the run's own records. Times are as measured there.")
    resources = files("ds_hybrid.observe.report")
    style, script = (Markup((resources / name).read_text(encoding="utf-8")) for name in ("report.css", "report.js"))
    style = join(Markup(stylesheet()), style)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:",
        ),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{view.name} - ds_hybrid report"),
        element("style", style),
    )
    script_element = element("script", script)
    html = element("html", head, element("body", header, element("main", *body), footer, script_element), lang="en")
    return f"<!DOCTYPE html>\n{html}\n"


def _summary(view: RunView) -> Markup:
    tiles = [
        element(
            "div", element("dt", name), element("dd", value, class_="value"), element("dd", beside, class_="beside")
        )
        for name, value, beside in headline(view)
    ]
    facts = [part for name, value in view.facts for part in (element("dt", name), element("dd", value))]
    return join(
        element("dl", *tiles, class_="tiles") if tiles else _empty("No step has been recorded yet."),
        element("dl", *facts, class_="facts"),
    )


def _advice(view: RunView) -> Markup:
    if not view.advice:
        return _empty("Nothing stands out: load is even, little communication is exposed, bytes are near the bound.")
    items = []
    for each in view.advice:
        word, kind = _SEVERITIES[each.severity]
        body = (element("span", word, class_="sort"), element("strong", each.title), element("p", each.text))
        items.append(element("li", *body, class_=kind))
    return element("ul", *items, class_="advice")


def _training(view: RunView) -> Markup:
    cards = [_line_card(name, view) for name in LINE_CHARTS if name in view.lines]
    if not cards:
        return _empty("No step has been recorded yet.")
    return join(_signs(view), element("div", *cards, class_="cards"))


def _line_card(name: str, view: RunView) -> Markup:
    title, shown, holds = LINE_CHARTS[name]
    lines = view.lines[name]
    scale = SCALES.get(name, 1.0)
    scaled = [Line(line.name, line.steps, tuple(scale * value for value in line.values), line.style) for line in lines]
    last = next((value for value in reversed(lines[0].values) if math.isfinite(value)), math.nan)
    first = next((value for value in lines[0].values if math.isfinite(value)), math.nan)
    chart = line_chart(
        scaled,
        label=f"{title} over optimizer steps, from {shown(first)} to {shown(last)}.",
        shown=lambda value: shown(value / scale),
        marks=view.marks,
        holds=holds,
    )
    names = legend([(f"line-{line.style}", line.name) for line in lines]) if len(lines) > 1 else None
    head = element("header", element("h3", title), element("span", shown(last), class_="now"))
    return element("article", head, names, chart, element("output"), class_="card", id=f"chart-{name}")


def _signs(view: RunView) -> Markup | None:
    """What the signs over the charts stand for, if there are any."""
    kinds = {mark.kind for mark in view.marks}
    entries = [("rebalance", "▾", "experts moved"), ("dispatcher", "◇", "a layer changed its dispatcher")]
    items = [
        element("li", element("span", sign, class_=f"sign {kind}"), text)
        for kind, sign, text in entries
        if kind in kinds
    ]
    return element("ul", *items, class_="legend") if items else None


def _load(view: RunView) -> Markup:
    if not view.layers:
        return _empty("No MoE layer has a record.")
    highest = charts.highest_load(view.layers)
    cards = [_load_card(layer, highest) for layer in view.layers]
    rest = cards[_MOST_OPEN_LAYERS:]
    return join(
        element(
            "p",
            "Each expert's share of its layer's tokens over time, against the mean. Bright rows are busy experts.",
            class_="sub",
        ),
        charts.load_scale(highest),
        _signs(view),
        element("div", *cards[:_MOST_OPEN_LAYERS], class_="cards"),
        _more([element("div", *rest, class_="cards")] if rest else [], count=len(rest)),
    )


def _more(layers: Sequence[Markup], count: int | None = None) -> Markup | None:
    """Layers that are shown at a click."""
    if not layers:
        return None
    return element("details", element("summary", f"{count or len(layers)} more layers"), *layers)


def _load_card(layer: LayerView, highest: float) -> Markup:
    spread = layer.late_spread()
    ranks = f"busiest rank {times(spread)}" if len(layer.last_slots) > 1 else ""
    head = element("header", element("h3", layer.name), element("span", ranks, class_="sub"))
    return element("article", head, charts.load_heatmap(layer, highest=highest), class_="card load-card")


def _timeline(step: StepView | None) -> Markup:
    if step is None:
        return _empty("No step of this run has a timeline.")
    drawn = charts.drawn_ranks(step)
    which = ""
    if len(drawn) < len(step.ranks):
        which = f" {len(drawn)} of {len(step.ranks)} ranks are drawn, those that waited least and most."
    others = f" Steps that have a timeline: {_step_list(step.others)} (--step)." if len(step.others) > 1 else ""
    text = (
        f"Step {step.step} took {in_seconds(step.seconds)}. Ranks stood still for messages in "
        f"{in_percent(step.exposed_fraction)} of it.{which}{others}"
    )
    entries = [(kind_class(name), name.replace("_", " ")) for name in step.names]
    entries += [
        ("waiting", "waiting (exposed communication)"),
        ("whole", "forward, optimizer"),
        ("whole-backward", "backward"),
    ]
    body = join(legend(entries), charts.timeline(step), _step_table(step) if step.names else None)
    return join(element("p", text, class_="sub"), element("div", body, class_="card"))


def _step_list(steps: Sequence[int]) -> str:
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "...", *shown[-3:]])


def _step_table(step: StepView) -> Markup:
    headings = ["rank", "node", *(name.replace("_", " ") for name in step.names), "waiting", "of the step"]
    drawn = charts.drawn_ranks(step)
    rows = [_step_row(rank, step) for rank in drawn]
    if len(drawn) < len(step.ranks):
        rows.append(_mean_row(step))
    return _table(headings, rows, words=2, caption="Milliseconds inside layers")


def _step_row(rank: RankTimeline, step: StepView) -> list[str]:
    spent = [f"{1e3 * rank.seconds(name):.1f}" for name in step.names]
    part = in_percent(rank.exposed / step.seconds) if step.seconds else DASH
    return [str(rank.rank), rank.node, *spent, f"{1e3 * rank.exposed:.1f}", part]


def _mean_row(step: StepView) -> list[str]:
    count = len(step.ranks)
    spent = [f"{1e3 * sum(rank.seconds(name) for rank in step.ranks) / count:.1f}" for name in step.names]
    waiting = 1e3 * sum(rank.exposed for rank in step.ranks) / count
    return ["all", f"mean of {count}", *spent, f"{waiting:.1f}", in_percent(step.exposed_fraction)]


def _bytes(view: RunView) -> Markup:
    sending = [layer for layer in view.layers if layer.wire.sent]
    if not sending:
        text = "MoE layers sent nothing: experts are on one rank, or there is no record."
        return _empty(text + _attention(view))
    sent = sum(layer.wire.sent for layer in sending)
    bound = sum(layer.wire.lower_bound for layer in sending)
    modes: dict[str, int] = {}
    for layer in sending:
        for mode, count in layer.wire.by_mode.items():
            modes[mode] = modes.get(mode, 0) + count
    by_mode = ", ".join(f"{mode} {in_bytes(count)}" for mode, count in sorted(modes.items(), key=lambda each: -each[1]))
    shown = sending
    which = ""
    if len(sending) > _MOST_BARS:
        shown = sorted(sending, key=lambda layer: -layer.wire.ratio)[:_MOST_BARS]
        which = f" The {_MOST_BARS} layers of {len(sending)} with the highest ratio are shown."
    ratio = times(sent / bound) if bound else "no bound"
    text = (
        f"In all, {in_bytes(sent)} left the ranks, forward and backward, metadata included: {ratio} what had to cross "
        f"({by_mode}). By layer, bytes for each token.{which}{_attention(view)}"
    )
    key = legend([("sent", "sent"), ("bound", "lower bound")])
    return join(element("p", text, class_="sub"), element("div", key, charts.bytes_bars(shown), class_="card"))


def _attention(view: RunView) -> str:
    if not view.attention_bytes:
        return ""
    return f" Attention over shared sequences sent {in_bytes(view.attention_bytes)} besides."


def _rebalances(view: RunView) -> Markup:
    if not view.rebalances:
        looked = f"The rebalancer looked {_times(view.num_looks)} and moved nothing." if view.num_looks else ""
        return _empty(looked or "Experts stayed where they were: rebalancing was off or has not looked yet.")
    rows = view.rebalances[-_MOST_ROWS:]
    values = [value for row in rows for value in _both(row) if value is not None]
    highest = max(values, default=2.0)
    headings = [
        "step",
        "layer",
        "outcome",
        "moved",
        "before",
        "after",
        "",
        "forecast",
        "gain",
        "measured gain",
        "reason",
    ]
    cells = [_rebalance_row(row, highest) for row in rows]
    caption = "Load of the busiest rank over the mean, measured before and after; gains in time of a step"
    table = _table(headings, cells[-_MOST_OPEN_ROWS:], words=3, last_is_long=True, caption=caption)
    earlier = cells[:-_MOST_OPEN_ROWS]
    folded = None
    if earlier:
        folded = element(
            "details",
            element("summary", f"{len(earlier)} rows before these"),
            _table(headings, earlier, words=3, last_is_long=True, caption=caption),
        )
    left_out = len(view.rebalances) - len(rows)
    more = f" The last {len(rows)} of {len(view.rebalances)} rows are shown." if left_out else ""
    text = f"The rebalancer looked {_times(view.num_looks)}.{more}" if view.num_looks else more.strip()
    colours = element(
        "ul",
        element("li", element("span", "●", class_="dot-before"), " before"),
        element(
            "li", element("span", "●", class_="dot-after"), " after, as measured, or as forecast where nothing moved"
        ),
        class_="legend",
    )
    return join(element("p", text, class_="sub"), element("div", colours, table, class_="card"), folded)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _both(row: RebalanceView) -> tuple[float | None, float | None]:
    """Spread before and after: measured where it was, else forecast."""
    if row.measured_before is not None and row.measured_after is not None:
        return row.measured_before, row.measured_after
    return row.predicted_before, row.predicted_after


def _rebalance_row(row: RebalanceView, highest: float) -> list[str]:
    before, after = _both(row)
    drawing = "" if before is None or after is None else charts.dumbbell(before, after, highest=highest)
    return [
        str(row.step),
        row.layer,
        row.outcome,
        str(row.num_moved),
        _or_dash(row.measured_before, times),
        _or_dash(row.measured_after, times),
        drawing,
        _or_dash(row.predicted_after, times),
        _or_dash(row.predicted_gain, in_seconds),
        _or_dash(row.measured_gain, in_seconds),
        row.reason,
    ]


def _or_dash(value: float | None, shown: Callable[[float], str]) -> str:
    return DASH if value is None else shown(value)


def _placement(view: RunView) -> Markup:
    layers = [layer for layer in view.layers if len(layer.last_slots) > 1]
    if not layers:
        return _empty("No layer has its experts on several ranks.")
    groups = max(layer.num_groups for layer in layers)
    replicas = f" {groups} expert-parallel groups hold the same; the first one is shown." if groups > 1 else ""
    text = (
        f"At the end of the run. Fill: an expert's load in the last quarter, a full box is 4{TIMES} the mean.{replicas}"
    )
    changed = [layer for layer in layers if layer.first_slots != layer.last_slots]
    first = max((layer.first_step for layer in changed), default=0)
    came = f"moved here since {f'step {first}' if first else 'the start'}"
    key = legend([("filled", "load"), *([("came", came)] if changed else [])])
    opened = (changed or layers)[0].name
    boxes = [
        element(
            "details",
            element("summary", element("strong", layer.name), element("span", f" {_moved_text(layer)}", class_="sub")),
            charts.placement_grid(layer, view.nodes),
            open="open" if layer.name == opened else None,
        )
        for layer in layers
    ]
    return join(element("p", text, class_="sub"), key, *boxes[:_MOST_OPEN_LAYERS], _more(boxes[_MOST_OPEN_LAYERS:]))


def _moved_text(layer: LayerView) -> str:
    moved = moved_between(layer.first_slots, layer.last_slots)
    text = f"{moved} of {layer.num_experts} experts moved" if moved else "as at the start"
    return f"{text}, busiest rank {times(layer.late_spread())}"


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, words: int, caption: str, last_is_long: bool = False
) -> Markup:
    """Scrolls sideways in its own box. The first ``words`` columns are flush left."""

    def kind(column: int) -> str | None:
        if last_is_long and column == len(headings) - 1:
            return "words long"
        return "words" if column < words else "draw" if not headings[column] else None

    head = [element("th", text, class_=kind(column), scope="col") for column, text in enumerate(headings)]
    body = [
        element("tr", *(element("td", cell, class_=kind(column)) for column, cell in enumerate(row))) for row in rows
    ]
    table = element("table", element("thead", element("tr", *head)), element("tbody", *body), aria_label=caption)
    box = element("div", table, class_="scroll", tabindex="0", role="group", aria_label=f"{caption}, scrolls sideways")
    return join(element("p", caption, class_="caption"), box)


def _empty(text: str) -> Markup:
    return element("p", text, class_="empty")
