"""What the report shows of a run: numbers and words, before anything is drawn. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from ds_hybrid.observe.events import WAIT, Span
from ds_hybrid.observe.report.palette import SPANS
from ds_hybrid.observe.report.plot import Line, Mark
from ds_hybrid.observe.timeline import covered_within

Severity = Literal["problem", "advice", "note"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Advice:
    """Something to look at, and what to do about it."""

    severity: Severity
    title: str
    text: str


@dataclass(frozen=True)
class WireView:
    """Bytes of one layer over the whole run, all ranks together.

    Attributes:
        sent: that left a rank, forward and backward, metadata included.
        lower_bound: that had to.
        num_tokens: routed.
        by_mode: ``sent`` by dispatcher.
    """

    sent: int
    lower_bound: int
    num_tokens: int
    by_mode: Mapping[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """``sent`` over ``lower_bound``; NaN when nothing had to cross."""
        return self.sent / self.lower_bound if self.lower_bound else float("nan")

    @property
    def bytes_per_token(self) -> float:
        return self.sent / self.num_tokens if self.num_tokens else float("nan")


@dataclass(frozen=True)
class LayerView:
    """One MoE layer over the run.

    Attributes:
        steps: of its records, ascending.
        num_steps: how many optimizer steps each of them covers, up to that one.
        loads: [records, E] (token, choice) pairs since the record before.
        rank_spread: per record the busiest rank's pairs over the ranks' mean, by the placement of that time.
        wire: its bytes.
        mode: its dispatcher at the end.
        marks: rebalances and changes of dispatcher.
        first_slots, last_slots: [P, E/P] the expert in each slot, at ``first_step`` and at the end of the run.
        first_step: from which on the layer was on as many ranks as at the end: where the run began, unless it was
            resumed with other sizes.
        group: the ranks of the first expert-parallel group, by place; ``num_groups`` hold the same experts.
    """

    name: str
    steps: tuple[int, ...]
    num_steps: tuple[int, ...]
    loads: IntArray
    rank_spread: tuple[float, ...]
    wire: WireView
    mode: str
    marks: tuple[Mark, ...] = ()
    first_slots: tuple[tuple[int, ...], ...] = ()
    last_slots: tuple[tuple[int, ...], ...] = ()
    first_step: int = 0
    group: tuple[int, ...] = ()
    num_groups: int = 1

    @property
    def num_experts(self) -> int:
        return int(self.loads.shape[1])

    @cached_property
    def relative_loads(self) -> FloatArray:
        """[records, E] load over the mean of the layer's experts in that record; NaN where nothing was routed."""
        return relative(self.loads)

    def late_loads(self) -> IntArray:
        """[E] pairs of the late records."""
        return self.loads[-self._num_late :].sum(axis=0)

    def late_spread(self) -> float:
        """The mean of ``rank_spread`` over the late records."""
        return mean(self.rank_spread[-self._num_late :])

    @property
    def _num_late(self) -> int:
        """Of the last quarter of the records those after ``first_step``, at least one."""
        since = sum(step > self.first_step for step in self.steps)
        return max(1, min(since, len(self.steps) // 4))


@dataclass(frozen=True)
class RebalanceView:
    """What was decided for one layer at one step. Spreads are the busiest rank's load over the mean.

    Attributes:
        outcome: in words.
        num_moved: experts that changed rank, or would have.
        predicted_before, predicted_after: forecast spread; None for a call of ``engine.move_experts``.
        measured_before, measured_after: by the records on both sides of a move; None where there are none.
        predicted_gain, measured_gain: seconds a step.
        cost: predicted seconds of the moves.
    """

    step: int
    layer: str
    outcome: str
    reason: str
    num_moved: int
    predicted_before: float | None = None
    predicted_after: float | None = None
    measured_before: float | None = None
    measured_after: float | None = None
    predicted_gain: float | None = None
    measured_gain: float | None = None
    cost: float | None = None


@dataclass(frozen=True)
class RankTimeline:
    """What one rank did in a step. ``spans`` of layers and of the whole model, by their starts."""

    rank: int
    node: str
    spans: tuple[Span, ...]

    @cached_property
    def of_layers(self) -> tuple[Span, ...]:
        """The work inside MoE layers, without the waits that lie in it."""
        return tuple(span for span in self.spans if span.layer is not None and span.name != WAIT)

    @cached_property
    def whole_model(self) -> tuple[Span, ...]:
        """Forward, backward, optimizer and whatever else is of no layer."""
        return tuple(span for span in self.spans if span.layer is None and span.name != WAIT)

    @cached_property
    def waits(self) -> tuple[Span, ...]:
        """When the rank stood still for messages."""
        return tuple(span for span in self.spans if span.name == WAIT)

    def seconds(self, name: str) -> float:
        """Of the spans of a name inside layers. Those of backward count without the forward that activation
        checkpointing repeats inside them, whose own spans do."""
        return self._seconds.get(name, 0.0)

    @cached_property
    def _seconds(self) -> Mapping[str, float]:
        """By name."""
        repeated = [span for span in self.of_layers if span.phase == "recompute"]
        backward = [span for span in self.of_layers if span.phase == "backward"]
        found: defaultdict[str, float] = defaultdict(float)
        for span in self.of_layers:
            found[span.name] += span.seconds
        for span, inside in zip(backward, covered_within(*_ends_of(backward), *_ends_of(repeated)), strict=True):
            found[span.name] -= float(inside)
        return found

    @property
    def exposed(self) -> float:
        """Seconds in which the rank stood still for messages of layers. Spans of layers lie inside one another, so
        what each of them waited does not add up."""
        return sum(wait.seconds for wait in self.waits)

    @property
    def end(self) -> float:
        """Seconds from the step's beginning until this rank's last span ends."""
        return max((span.start + span.seconds for span in self.spans), default=0.0)


@dataclass(frozen=True)
class StepView:
    """The timeline of one step; ``others`` are all steps that have one."""

    step: int
    seconds: float
    ranks: tuple[RankTimeline, ...]
    others: tuple[int, ...] = ()

    @property
    def exposed_fraction(self) -> float:
        """Of the ranks' time together, the part in which they stood still for messages."""
        total = self.seconds * len(self.ranks)
        return sum(rank.exposed for rank in self.ranks) / total if total else float("nan")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the spans inside layers: those that ds_hybrid knows in their order, then others."""
        found = {span.name for rank in self.ranks for span in rank.of_layers}
        return (*(name for name in SPANS if name in found), *sorted(found - set(SPANS)))


@dataclass(frozen=True)
class RunView:
    """A whole run.

    Attributes:
        name: of its directory.
        facts: (name, value) rows about the run.
        lines: over steps, by what they show, such as ``loss``; a line without any number is left out.
        layers: in model order; those without a record are left out.
        num_looks: how often the rebalancer looked, whatever came of it.
        marks: rebalances and changes of dispatcher, one for each step and kind.
        nodes: [R] the name of each rank's node.
        step: the timeline, where there is one.
        attention_bytes: that left a rank for attention over shared sequences.
    """

    name: str
    facts: tuple[tuple[str, str], ...]
    lines: Mapping[str, tuple[Line, ...]]
    layers: tuple[LayerView, ...]
    rebalances: tuple[RebalanceView, ...]
    num_looks: int
    marks: tuple[Mark, ...]
    nodes: tuple[str, ...]
    step: StepView | None
    attention_bytes: int = 0
    advice: tuple[Advice, ...] = ()


def _ends_of(spans: Sequence[Span]) -> tuple[FloatArray, FloatArray]:
    """[N] when each begins and ends."""
    starts = np.array([span.start for span in spans], dtype=np.float64)
    return starts, starts + np.array([span.seconds for span in spans], dtype=np.float64)


def relative(loads: IntArray | FloatArray) -> FloatArray:
    """[records, E] counts over their row's mean; NaN in rows without any."""
    means = loads.mean(axis=1, keepdims=True, dtype=np.float64)
    return np.divide(loads, means, out=np.full(loads.shape, np.nan), where=means > 0)


def spread(loads: npt.ArrayLike) -> float:
    """The highest of some loads over their mean; NaN when there is none."""
    values = np.asarray(loads, dtype=np.float64)
    return float(values.max() / values.mean()) if values.size and values.any() else float("nan")


def mean(values: Sequence[float]) -> float:
    """Of the numbers among ``values``; NaN when there is none."""
    known = [value for value in values if np.isfinite(value)]
    return sum(known) / len(known) if known else float("nan")
