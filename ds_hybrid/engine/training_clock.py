"""How long training takes, evaluation and checkpoints left out."""

from __future__ import annotations

from collections.abc import Callable

from deepspeed.accelerator import get_accelerator

from ds_hybrid.dispatch.stopwatch import Instant, instant, seconds_between


class TrainingClock:
    """Runs from :meth:`begin`, but not from the last work of training before a pause to the first one after it.

    It reads instants of the device's stream where there is one: what was given to the device and is still to be done
    when the host comes to a pause is training's all the same. Nothing waits until :meth:`seconds` is asked for.

    Args:
        now: gives instants.
    """

    def __init__(self, now: Callable[[], Instant] = instant) -> None:
        self._now = now
        self.begin(is_paused=True)

    def begin(self, *, is_paused: bool = False) -> None:
        """Count from here."""
        self._began = self._worked = self._now()
        self._pauses: list[tuple[Instant, Instant]] = []
        self._is_paused = is_paused

    def work(self) -> None:
        """Training goes on: a pause is over."""
        if self._is_paused:
            self._pauses.append((self._worked, self._now()))
            self._is_paused = False

    def worked(self) -> None:
        """A work of training has been given to the device."""
        self._worked = self._now()

    def pause(self) -> None:
        """What comes now is no training, nor was what came since the last work of it."""
        self._is_paused = True

    def seconds(self) -> float:
        """Since :meth:`begin`. Waits for the device."""
        end = self._worked if self._is_paused else self._now()
        get_accelerator().synchronize()
        paused = sum(seconds_between(*pause) for pause in self._pauses)
        return seconds_between(self._began, end) - paused
