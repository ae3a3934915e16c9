"""Time inside ``with``, from a clock that the tests set: the host's, or that of a device with events."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from ds_hybrid.dispatch import stopwatch
from ds_hybrid.dispatch.stopwatch import Stopwatch

BOUND = 512
"""Pairs of events that may wait to be read."""


@dataclass
class Device:
    """An accelerator, or a CPU that does the work itself; a pair of clocks.

    Attributes:
        now: seconds, of the host or of what the stream has been told to do.
        has_passed: whether the device is done with the events so far.
        num_read: events whose time was asked for.
    """

    is_host: bool
    now: float = 100.0
    has_passed: bool = True
    num_read: int = 0
    log: list[str] = field(default_factory=list)

    def is_synchronized_device(self) -> bool:
        return self.is_host

    def perf_counter(self) -> float:
        assert self.is_host, "a device's stream has its own time"
        return self.now

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self.has_passed = True

    def Event(self, *, enable_timing: bool) -> Event:  # noqa: N802
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._milliseconds: float | None = None

    def record(self) -> None:
        self._milliseconds = 1000 * self._device.now

    def query(self) -> bool:
        return self._device.has_passed

    def elapsed_time(self, end: Event) -> float:
        assert self._device.has_passed, "torch raises where an event has not passed"
        assert self._milliseconds is not None
        assert end._milliseconds is not None
        self._device.num_read += 1
        return end._milliseconds - self._milliseconds


def install(patch: pytest.MonkeyPatch, device: Device) -> Device:
    patch.setattr(stopwatch, "get_accelerator", lambda: device)
    patch.setattr(stopwatch, "time", device)
    return device


def pause(watch: Stopwatch, device: Device, seconds: float) -> None:
    with watch:
        device.now += seconds
    device.now += 5.0  # outside: not counted


@pytest.mark.parametrize("is_host", [True, False], ids=["host", "device"])
def test_adds_up_what_is_inside(monkeypatch: pytest.MonkeyPatch, is_host: bool) -> None:
    device, watch = install(monkeypatch, Device(is_host)), Stopwatch()
    assert watch.total() == 0.0
    for seconds in (0.5, 0.25):
        pause(watch, device, seconds)
    assert watch.total() == 0.75
    pause(watch, device, 2.0)
    assert watch.total() == 2.75


@pytest.mark.parametrize("is_host", [True, False], ids=["host", "device"])
def test_counts_a_wait_that_fails(monkeypatch: pytest.MonkeyPatch, is_host: bool) -> None:
    device, watch = install(monkeypatch, Device(is_host)), Stopwatch()
    try:
        with watch:
            device.now += 0.5
            raise RuntimeError("the connection is lost")
    except RuntimeError:
        device.now += 5.0
    assert watch.total() == 0.5


def test_nothing_waits_for_a_device_before_the_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    device, watch = install(monkeypatch, Device(is_host=False, has_passed=False)), Stopwatch()
    for _ in range(BOUND + 100):
        pause(watch, device, 0.5)
    assert device.log == []
    assert device.num_read == 0
    assert watch.total() == 0.5 * (BOUND + 100)
    assert device.log == ["synchronize"]


def test_a_host_never_waits_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    device, watch = install(monkeypatch, Device(is_host=True)), Stopwatch()
    pause(watch, device, 0.5)
    watch.total()
    assert device.log == []


def test_old_events_are_read_as_soon_as_they_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that at most 512 pairs wait, however rarely the time is taken, and no second is lost or counted twice."""
    device, watch = install(monkeypatch, Device(is_host=False)), Stopwatch()
    for _ in range(BOUND):
        pause(watch, device, 0.25)
    assert device.num_read == 0
    for number in range(1, 101):
        pause(watch, device, 0.5)
        assert device.num_read == number
    device.has_passed = False  # a device that falls behind
    for _ in range(10):
        pause(watch, device, 1.0)
    assert device.num_read == 100
    device.has_passed = True
    pause(watch, device, 1.0)
    assert device.num_read == 111
    assert device.log == []
    assert watch.total() == 0.25 * BOUND + 0.5 * 100 + 1.0 * 11
