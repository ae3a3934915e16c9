"""Spans of all ranks on one clock, and of which steps they are kept. Pure."""

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


@dataclass(frozen=True)
class SpanColumns:
    """What one rank sends of its N spans: 28 bytes each.

    Attributes:
        names: what the numbers in ``name`` stand for.
        name, phase: [N] uint8.
        layer: [N] int16.
        start_us, us, exposed_us: [N] int64 microseconds; starts as those of :class:`Timed`.
    """

    names: tuple[str, ...]
    name: npt.NDArray[np.uint8]
    phase: npt.NDArray[np.uint8]
    layer: npt.NDArray[np.int16]
    start_us: npt.NDArray[np.int64]
    us: npt.NDArray[np.int64]
    exposed_us: npt.NDArray[np.int64]


def span_columns(spans: Sequence[Timed]) -> SpanColumns:
    """The spans of one rank, and how much of each was waiting."""
    names = {name: number for number, name in enumerate(dict.fromkeys(span.name for span in spans))}
    phases: dict[str, int] = {phase: number for number, phase in enumerate(PHASES)}
    starts = np.array([span.start for span in spans], dtype=np.float64)
    ends = starts + np.array([span.seconds for span in spans], dtype=np.float64)
    is_wait = np.array([span.name == WAIT for span in spans], dtype=bool)
    return SpanColumns(
        names=tuple(names),
        name=np.array([names[span.name] for span in spans], dtype=np.uint8),
        phase=np.array([phases[span.phase] for span in spans], dtype=np.uint8),
        layer=np.array([span.layer for span in spans], dtype=np.int16),
        start_us=_microseconds(starts),
        us=_microseconds(ends - starts),
        exposed_us=_microseconds(covered_within(starts, ends, starts[is_wait], ends[is_wait])),
    )


def timeline_record(
    columns_of_rank: Sequence[SpanColumns], layers: Sequence[str], *, time: float, step: int
) -> TimelineRecord:
    """The record of a step; its clock begins with the first span of any rank.

    Args:
        columns_of_rank: for each of the R ranks.
        layers: the names that the spans' numbers stand for.
    """
    names = tuple(dict.fromkeys(name for columns in columns_of_rank for name in columns.names))
    with_spans = [columns for columns in columns_of_rank if columns.names]
    begin_us = min((int(columns.start_us.min()) for columns in with_spans), default=0)
    end_us = max((int((columns.start_us + columns.us).max()) for columns in with_spans), default=0)
    return TimelineRecord(
        time=time,
        step=step,
        seconds=(end_us - begin_us) / 1e6,
        names=names,
        phases=PHASES,
        layers=tuple(layers),
        ranks=tuple(_of_rank(rank, columns, names, begin_us) for rank, columns in enumerate(columns_of_rank)),
    )


def _of_rank(rank: int, columns: SpanColumns, names: tuple[str, ...], begin_us: int) -> RankSpans:
    in_record = np.array([names.index(name) for name in columns.names], dtype=np.int64)
    return RankSpans(
        rank=rank,
        name=tuple(in_record[columns.name].tolist()),
        phase=tuple(columns.phase.tolist()),
        layer=tuple(columns.layer.tolist()),
        start_us=tuple((columns.start_us - begin_us).tolist()),
        us=tuple(columns.us.tolist()),
        exposed_us=tuple(columns.exposed_us.tolist()),
    )


def covered_within(
    starts: npt.NDArray[np.float64],
    ends: npt.NDArray[np.float64],
    piece_starts: npt.NDArray[np.float64],
    piece_ends: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """The part of each span [N] that pieces [W] cover, no two of which overlap: a rank waits for one message at a time,
    and repeats one work of forward at a time."""
    if not len(piece_starts):
        return np.zeros_like(starts)
    order = np.argsort(piece_starts)
    edges = np.stack([piece_starts[order], piece_ends[order]], axis=1).ravel()
    lengths = (piece_ends - piece_starts)[order].cumsum()
    until_edge = np.stack([np.concatenate([[0.0], lengths[:-1]]), lengths], axis=1).ravel()
    covered: npt.NDArray[np.float64] = np.interp(ends, edges, until_edge) - np.interp(starts, edges, until_edge)
    return covered


def _microseconds(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    return np.rint(1e6 * seconds).astype(np.int64)


def is_kept(number: int) -> bool:
    """Whether the ``number``-th record since a start comes with a timeline: those of up to two significant digits.

    So all of the first 100 do, then every 10th, from the 1000th on every 100th: 90 for each tenfold of what follows.
    """
    return number % 10 ** max(len(str(number)) - 2, 0) == 0
