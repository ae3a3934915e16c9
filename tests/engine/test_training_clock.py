"""The time of training, without pauses: on a host that does the work itself, and on a device that runs behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from ds_hybrid.engine.training_clock import TrainingClock


@dataclass
class Event:
    """Of a device's stream, as ``torch.cuda.Event``: reached when all that was given before it is done."""

    at: float

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


class Device:
    """A host that gives works to a stream. Each takes the host and the stream their own time."""

    def __init__(self) -> None:
        self.host = self.stream = 100.0

    def run(self, *, host: float, stream: float) -> None:
        self.stream = max(self.stream, self.host) + stream
        self.host += host

    def wait(self) -> None:
        self.host = max(self.host, self.stream)

    def on_host(self) -> float:
        return self.host

    def on_stream(self) -> Event:
        return Event(max(self.host, self.stream))


Now = Callable[[Device], Any]


@pytest.fixture(params=[Device.on_host, Device.on_stream], ids=["host", "stream"])
def now(request: pytest.FixtureRequest) -> Now:
    given: Now = request.param
    return given


def step(clock: TrainingClock, device: Device, seconds: float = 2.0) -> None:
    clock.work()
    device.run(host=seconds, stream=0.0)
    clock.worked()


def test_pauses_are_left_out(now: Now) -> None:
    device = Device()
    clock = TrainingClock(lambda: now(device))
    device.run(host=50.0, stream=0.0)  # before the first step
    step(clock, device)
    device.run(host=1.0, stream=0.0)  # data are fetched: not a pause
    step(clock, device)
    device.run(host=7.0, stream=0.0)  # from the last step on, an evaluation takes this
    clock.pause()
    device.run(host=9.0, stream=0.0)
    clock.pause()  # the next batch of it
    step(clock, device)
    assert clock.seconds() == pytest.approx(7.0)
    clock.pause()
    device.run(host=9.0, stream=0.0)
    assert clock.seconds() == pytest.approx(7.0)
    clock.begin()
    step(clock, device, 3.0)
    assert clock.seconds() == pytest.approx(3.0)


def test_what_the_device_has_still_to_do_at_a_pause_is_trainings() -> None:
    device = Device()
    clock = TrainingClock(device.on_stream)
    clock.begin()
    for _ in range(4):
        clock.work()
        device.run(host=0.1, stream=2.0)
        clock.worked()
    clock.pause()
    device.run(host=0.5, stream=6.0)  # an evaluation, given while the device still trains, and still at work
    clock.work()
    device.run(host=0.1, stream=2.0)
    clock.worked()
    device.wait()
    assert clock.seconds() == pytest.approx(5 * 2.0)
