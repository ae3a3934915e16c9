"""Spans of all ranks on one clock. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from ds_hybrid.observe.events import WAIT, Phase, RankSpans, TimelineRecord

PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Timed:
    """A span on its rank's clock.

    Attributes:
        layer: its number, -1 for the whole model.
        start: seconds from an instant that all ranks share, such as the end of a collective; mostly below 0.
    """

    name: str
    phase: str
    layer: int
    start: float
    seconds: float


def timeline_record(
    spans_of_rank: Sequence[Sequence[Timed]], layers: Sequence[str], *, time: float, step: int
) -> TimelineRecord:
    """The record of a step; its clock begins with the first span of any rank.

    Args:
        spans_of_rank: for each of the R ranks.
        layers: the names that the spans' numbers stand for.
    """
    everything = [span for spans in spans_of_rank for span in spans]
    names = list(dict.fromkeys(span.name for span in everything))
    begin = min((span.start for span in everything), default=0.0)
    end = max((span.start + span.seconds for span in everything), default=0.0)
    return TimelineRecord(
        time=time,
        step=step,
        seconds=end - begin,
        names=tuple(names),
        phases=PHASES,
        layers=tuple(layers),
        ranks=tuple(_columns(rank, spans, names, begin) for rank, spans in enumerate(spans_of_rank)),
    )


def _columns(rank: int, spans: Sequence[Timed], names: list[str], begin: float) -> RankSpans:
    starts = np.array([span.start - begin for span in spans], dtype=np.float64)
    ends = starts + np.array([span.seconds for span in spans], dtype=np.float64)
    is_wait = np.array([span.name == WAIT for span in spans], dtype=bool)
    exposed = waited_within(starts, ends, starts[is_wait], ends[is_wait])
    return RankSpans(
        rank=rank,
        name=tuple(names.index(span.name) for span in spans),
        phase=tuple(PHASES.index(span.phase) for span in spans),
        layer=tuple(span.layer for span in spans),
        start_us=_microseconds(starts),
        us=_microseconds(ends - starts),
        exposed_us=_microseconds(exposed),
    )


def waited_within(
    starts: npt.NDArray[np.float64],
    ends: npt.NDArray[np.float64],
    wait_starts: npt.NDArray[np.float64],
    wait_ends: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """The part of each span [N] that lies in waits [W]. A rank waits for one message at a time."""
    if not len(wait_starts):
        return np.zeros_like(starts)
    order = np.argsort(wait_starts)
    edges = np.stack([wait_starts[order], wait_ends[order]], axis=1).ravel()
    lengths = (wait_ends - wait_starts)[order].cumsum()
    waited_by_edge = np.stack([np.concatenate([[0.0], lengths[:-1]]), lengths], axis=1).ravel()
    waited: npt.NDArray[np.float64] = np.interp(ends, edges, waited_by_edge) - np.interp(starts, edges, waited_by_edge)
    return waited


def _microseconds(seconds: npt.NDArray[np.float64]) -> tuple[int, ...]:
    return tuple(np.rint(1e6 * seconds).astype(int).tolist())
