"""Where a run's experts were and when: through moves, resumes and other layouts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ds_hybrid.observe.events import RebalanceRecord, Record, ResumeRecord, RunRecord, StepRecord
from ds_hybrid.observe.report.view import FloatArray, IntArray, relative

Slots = tuple[tuple[int, ...], ...]
"""[P][E/P], the experts of each place of an expert-parallel group."""


@dataclass(frozen=True)
class Placed:
    """Where a layer's experts are from a step on."""

    step: int
    slots: Slots


@dataclass(frozen=True)
class LayerHistory:
    """The placements of one layer.

    Attributes:
        changes: ascending; each differs from the one before.
        num_moved: by place among the run's ``rebalance`` records, the experts that changed rank there.
    """

    changes: tuple[Placed, ...]
    num_moved: Mapping[int, int] = field(default_factory=dict)

    def during(self, first: IntArray, last: IntArray) -> IntArray:
        """[N] the places in ``changes`` that held in most of the steps ``first`` + 1 to ``last`` [N]."""
        begin = np.array([change.step for change in self.changes], dtype=np.int64)
        end = np.append(begin[1:], np.iinfo(np.int64).max)
        lasted = np.minimum(end, last[:, None]) - np.maximum(begin, first[:, None])
        return np.asarray(lasted.argmax(axis=1), dtype=np.int64)

    def rank_spread(self, loads: IntArray, first: IntArray, last: IntArray) -> FloatArray:
        """[N] the busiest rank's pairs over the ranks' mean, for ``loads`` [N, E] of the steps ``first`` + 1 to
        ``last``, by the placement of that time."""
        place = self.during(first, last)
        found = np.full(len(loads), np.nan)
        for each in np.unique(place):
            of_ranks = loads[place == each][:, np.asarray(self.changes[each].slots)].sum(axis=2)
            found[place == each] = relative(of_ranks).max(axis=1)
        return found

    @property
    def laid_out(self) -> Placed:
        """The first placement over as many ranks as the last one."""
        num_ranks = [len(change.slots) for change in self.changes]
        place = len(num_ranks) - 1
        while place and num_ranks[place - 1] == num_ranks[-1]:
            place -= 1
        return self.changes[place]


def histories(records: Sequence[Record]) -> dict[str, LayerHistory]:
    """By layer, the placements of a run, from its records in their order.

    What a process says of experts before it loads a checkpoint holds for no step: it counts from the resume's step,
    where the checkpoint's placement takes its place. A checkpoint that is loaded after later steps, and from which no
    step was made yet, counts after those.
    """
    begins = _begins(records)
    changes: dict[str, list[Placed]] = {}
    num_moved: dict[str, dict[int, int]] = {}
    step = num_rebalances = 0
    for place, record in enumerate(records):
        step = max(step, begins.get(place, record.step))
        placed: Mapping[str, Slots] = {}
        if isinstance(record, RunRecord):
            placed = {layer.name: layer.expert_of_slot for layer in record.layers}
        elif isinstance(record, ResumeRecord | RebalanceRecord):
            placed = record.placements
        for layer, slots in placed.items():
            known = changes.setdefault(layer, [])
            if isinstance(record, RebalanceRecord) and known:
                num_moved.setdefault(layer, {})[num_rebalances] = moved_between(known[-1].slots, slots)
            if known and known[-1].step == step:
                known.pop()
            known.append(Placed(step, slots))
        num_rebalances += isinstance(record, RebalanceRecord)
    return {layer: LayerHistory(_unlike(found), num_moved.get(layer, {})) for layer, found in changes.items()}


def moved_between(before: Slots, after: Slots) -> int:
    """Experts that changed rank, between placements over the same number of ranks."""
    return sum(len(set(new) - set(old)) for old, new in zip(before, after, strict=True))


def _begins(records: Sequence[Record]) -> dict[int, int]:
    """From which step a start of the run counts that loaded a checkpoint before its first step, by place."""
    found: dict[int, int] = {}
    started: int | None = None
    for place, record in enumerate(records):
        if isinstance(record, RunRecord):
            started = place
        elif isinstance(record, ResumeRecord) and started is not None:
            found[started] = record.step
        elif isinstance(record, StepRecord):
            started = None
    return found


def _unlike(changes: Sequence[Placed]) -> tuple[Placed, ...]:
    """Without what repeats the placement before it, as the record of a resume does."""
    return tuple(each for place, each in enumerate(changes) if not place or each.slots != changes[place - 1].slots)
