"""How long a rank spends on something, on the host or on the device's stream."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Any

from deepspeed.accelerator import get_accelerator

_MOST_EVENTS = 512

Instant = Any
"""Seconds of the host's clock where it does the work itself (CPU), else an event of the current stream."""


def instant() -> Instant:
    """Now. On a device nothing waits."""
    return time.perf_counter() if get_accelerator().is_synchronized_device() else _record()


def seconds_between(begin: Instant, end: Instant) -> float:
    """Below 0 where ``end`` came first. A device must have come past both."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000


class Stopwatch:
    """Adds up the time inside ``with``: the host's where it does the work itself (CPU), else the current stream's.

    On a device two events are recorded and nothing waits; they are read when they have long passed.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began: Instant = None
        self._events: deque[tuple[Instant, Instant]] = deque()

    def __enter__(self) -> None:
        self._began = instant()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(self._began, float):
            self._seconds += time.perf_counter() - self._began
            return
        self._events.append((self._began, _record()))
        while len(self._events) > _MOST_EVENTS and self._events[0][1].query():
            self._add_oldest()

    def total(self) -> float:
        """Seconds since the beginning. Waits for the device."""
        if self._events:
            get_accelerator().synchronize()
        while self._events:
            self._add_oldest()
        return self._seconds

    def _add_oldest(self) -> None:
        began, ended = self._events.popleft()
        self._seconds += seconds_between(began, ended)


def _record() -> Any:
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event
