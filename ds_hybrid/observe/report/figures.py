"""The report's charts once more, on matplotlib figures that the caller makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from ds_hybrid.observe.events import Span
from ds_hybrid.observe.report.charts import drawn_ranks, heatmap_columns, highest_load
from ds_hybrid.observe.report.page import LINE_CHARTS, SCALES
from ds_hybrid.observe.report.palette import COLOURS, SPANS
from ds_hybrid.observe.report.pixels import place_of, scale_colours
from ds_hybrid.observe.report.plot import MOST_MARK_LINES, Mark
from ds_hybrid.observe.report.scales import times
from ds_hybrid.observe.report.view import LayerView, RebalanceView, RunView, StepView
from ds_hybrid.observe.trace import COMMUNICATION

_MOST_LAYERS: Final = 24
_MOST_ROWS: Final = 48


@dataclass(frozen=True)
class FigureOf:
    """A picture to make: its file's name, its size in inches, and what draws it on a figure of that size."""

    name: str
    width: float
    height: float
    draw: Callable[[Any], None]


def figures_of(view: RunView) -> list[FigureOf]:
    """Those of the charts for which the run has numbers."""
    found = []
    names = [name for name in LINE_CHARTS if name in view.lines]
    if names:
        rows = math.ceil(len(names) / 2)
        found.append(FigureOf("training", 10, 2.6 * rows, partial(_training, view=view, names=names)))
    layers = view.layers[:_MOST_LAYERS]
    if layers:
        rows = math.ceil(len(layers) / 3)
        found.append(FigureOf("expert_load", 12, 0.8 + 2.4 * rows, partial(_loads, layers=layers)))
    if view.step is not None:
        height = 1.5 + 0.45 * len(drawn_ranks(view.step))
        found.append(FigureOf("timeline", 12, height, partial(_timeline, step=view.step)))
    sending = [layer for layer in view.layers if layer.wire.sent]
    if sending:
        found.append(FigureOf("bytes", 9, 1.2 + 0.3 * len(sending), partial(_bytes, layers=sending)))
    moved = [row for row in view.rebalances if row.measured_before is not None and row.measured_after is not None]
    moved = moved[-_MOST_ROWS:]
    if moved:
        found.append(FigureOf("rebalances", 9, 1.2 + 0.3 * len(moved), partial(_rebalances, rows=moved)))
    spread_out = [layer for layer in layers if len(layer.last_slots) > 1]
    if spread_out:
        rows = math.ceil(len(spread_out) / 3)
        found.append(FigureOf("placement", 12, 0.8 + 2.4 * rows, partial(_placement, layers=spread_out)))
    return found


def _training(figure: Any, view: RunView, names: Sequence[str]) -> None:
    axes = figure.subplots(math.ceil(len(names) / 2), 2, squeeze=False).ravel()
    for axis, name in zip(axes, names, strict=False):
        title, _, holds = LINE_CHARTS[name]
        for line in view.lines[name]:
            values = np.asarray(line.values) * SCALES.get(name, 1.0)
            axis.plot(line.steps, values, marker="." if len(line.steps) < 3 else "", label=line.name)
        for mark in view.marks:
            axis.axvline(mark.step, ymin=_mark_foot(view.marks), color=COLOURS[mark.kind].light, linewidth=1)
        axis.update_datalim([(view.lines[name][0].steps[0], value) for value in holds])
        axis.autoscale_view()
        axis.ticklabel_format(axis="y", useOffset=False)
        if len(view.lines[name]) > 1:
            axis.legend(fontsize="small")
        axis.set_title(title, fontsize="medium", loc="left")
        axis.set_xlabel("optimizer step")
    for axis in axes[len(names) :]:
        axis.set_axis_off()


def _mark_foot(marks: Sequence[Mark]) -> float:
    """Where a mark's line begins: at the bottom, or of many marks near the top."""
    return 0.0 if len(marks) <= MOST_MARK_LINES else 0.95


def _colour_map() -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap([tuple(channel / 255 for channel in colour) for colour in scale_colours()])


def _norm(highest: float) -> Any:
    """As :func:`ds_hybrid.observe.report.pixels.place_of` has it."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0, vmax=highest, clip=True)


def _loads(figure: Any, layers: Sequence[LayerView]) -> None:
    highest = highest_load(layers)
    axes = figure.subplots(math.ceil(len(layers) / 3), 3, squeeze=False).ravel()
    image = None
    for axis, layer in zip(axes, layers, strict=False):
        across, columns = heatmap_columns(layer)
        extent = (across.low, across.high, layer.num_experts - 0.5, -0.5)
        image = axis.imshow(
            columns.T, aspect="auto", cmap=_colour_map(), norm=_norm(highest), extent=extent, interpolation="nearest"
        )
        for mark in layer.marks:
            line = "-" if mark.kind == "rebalance" else ":"
            axis.axvline(mark.step, ymin=_mark_foot(layer.marks), color="white", linewidth=1.2, linestyle=line)
        axis.set_title(layer.name, fontsize="medium", loc="left")
        axis.set_xlabel("optimizer step")
        axis.set_ylabel("expert")
    for axis in axes[len(layers) :]:
        axis.set_axis_off()
    figure.colorbar(image, ax=axes.tolist(), label="load over the layer's mean", shrink=0.6)


def _timeline(figure: Any, step: StepView) -> None:
    axis = figure.subplots()
    ranks = drawn_ranks(step)
    for row, rank in enumerate(ranks):
        axis.broken_barh(_bars(rank.whole_model), (row - 0.45, 0.1), color=COLOURS["whole"].light)
        for name in step.names:
            low = row + 0.05 if name in COMMUNICATION else row - 0.3
            bars = _bars([span for span in rank.of_layers if span.name == name])
            axis.broken_barh(bars, (low, 0.3), color=_colour(name))
        axis.broken_barh(
            _bars(rank.waits), (row + 0.05, 0.3), facecolor="white", edgecolor=COLOURS["hatch"].light, hatch="////"
        )
    axis.set_yticks(range(len(ranks)), [f"rank {rank.rank}\n{rank.node}" for rank in ranks], fontsize="small")
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds since the step began")
    axis.set_title(f"Step {step.step}", fontsize="medium", loc="left")
    axis.legend(handles=_timeline_keys(step), fontsize="small", ncols=8, loc="lower right", bbox_to_anchor=(1, 1))


def _bars(spans: Sequence[Span]) -> list[tuple[float, float]]:
    return [(1e3 * span.start, 1e3 * span.seconds) for span in spans]


def _colour(span: str) -> str:
    return COLOURS[span if span in SPANS else "other"].light


def _timeline_keys(step: StepView) -> list[Any]:
    from matplotlib.patches import Patch

    keys = [Patch(color=_colour(name), label=name.replace("_", " ")) for name in step.names]
    return [*keys, Patch(facecolor="white", edgecolor=COLOURS["hatch"].light, hatch="////", label="waiting")]


def _bytes(figure: Any, layers: Sequence[LayerView]) -> None:
    axis = figure.subplots()
    rows = range(len(layers))
    axis.barh(rows, [layer.wire.bytes_per_token for layer in layers], color=COLOURS["dispatch"].light, label="sent")
    bounds = [layer.wire.lower_bound / layer.wire.num_tokens for layer in layers]
    axis.scatter(bounds, rows, marker="|", s=140, color="black", label="lower bound", zorder=3)
    for row, layer in enumerate(layers):
        text = f" {times(layer.wire.ratio)} {layer.mode}"
        axis.text(layer.wire.bytes_per_token, row, text, va="center", fontsize="small")
    axis.set_yticks(rows, [layer.name for layer in layers], fontsize="small")
    axis.margins(x=0.2)
    axis.invert_yaxis()
    axis.set_xlabel("bytes for each token, forward and backward")
    axis.legend(fontsize="small", loc="lower right", bbox_to_anchor=(1, 1), ncols=2)


def _rebalances(figure: Any, rows: Sequence[RebalanceView]) -> None:
    axis = figure.subplots()
    places = range(len(rows))
    before, after = [row.measured_before for row in rows], [row.measured_after for row in rows]
    axis.hlines(places, before, after, color=COLOURS["soft"].light)
    axis.scatter(before, places, color=COLOURS["rebalance"].light, label="before", zorder=3)
    axis.scatter(after, places, color=COLOURS["experts"].light, label="after", zorder=3)
    axis.set_yticks(places, [f"step {row.step}, {row.layer}" for row in rows], fontsize="small")
    axis.invert_yaxis()
    axis.set_xlabel("busiest rank's load over the mean")
    axis.legend(fontsize="small", loc="lower right", bbox_to_anchor=(1, 1), ncols=2)


def _placement(figure: Any, layers: Sequence[LayerView]) -> None:
    axes = figure.subplots(math.ceil(len(layers) / 3), 3, squeeze=False).ravel()
    highest = highest_load(layers)
    for axis, layer in zip(axes, layers, strict=False):
        slots = np.asarray(layer.last_slots)
        loads = layer.late_loads() / max(layer.late_loads().mean(), 1e-9)
        axis.imshow(loads[slots], aspect="auto", cmap=_colour_map(), norm=_norm(highest))
        if slots.size <= 128:
            for (rank, slot), expert in np.ndenumerate(slots):
                dark = float(place_of(loads[expert], highest)) < 0.6
                colour = "white" if dark else "black"
                axis.text(slot, rank, str(expert), ha="center", va="center", color=colour, fontsize="small")
        names = [str(layer.group[place] if layer.group else place) for place in range(len(slots))]
        every = max(1, len(names) // 8)
        axis.set_xticks(range(0, slots.shape[1], max(1, slots.shape[1] // 8)))
        axis.set_yticks(range(0, len(names), every), names[::every])
        axis.set_title(layer.name, fontsize="medium", loc="left")
        axis.set_ylabel("rank")
        axis.set_xlabel("slot")
    for axis in axes[len(layers) :]:
        axis.set_axis_off()
