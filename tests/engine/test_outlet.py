"""What fails is left alone, with one warning."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from deepspeed.utils import logger

from ds_hybrid.engine.outlet import Outlet


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (ConnectionError("the board is away"), "the board is away"),
        (ValueError("not JSON"), "ValueError: not JSON"),
    ],
)
def test_one_warning_and_no_more(warnings: list[str], error: Exception, words: str) -> None:
    told: list[str] = []
    outlet = Outlet("runs/1", told)

    def fails(target: list[str]) -> None:
        target.append("half")
        raise error

    outlet.tell(lambda target: target.append("whole"))
    outlet.tell(fails)
    outlet.tell(lambda target: target.append("never"))
    assert told == ["whole", "half"]
    assert warnings == [f"ds_hybrid: observe: runs/1: {words}. Nothing more is written there; training goes on."]


def test_what_ends_is_let_go_of_once(warnings: list[str]) -> None:
    def release(target: list[str]) -> None:
        target.append("released")
        raise OSError(5, "Input/output error")

    def fails(_: list[str]) -> None:
        raise ValueError("not JSON")

    closed: list[str] = []
    failed: list[str] = []
    outlet = Outlet("runs/1", closed, release)
    for _ in range(2):
        outlet.close()
    outlet.tell(fails)
    assert warnings == [
        "ds_hybrid: observe: runs/1: [Errno 5] Input/output error. Nothing more is written there; training goes on."
    ]
    outlet = Outlet("runs/2", failed, release)
    outlet.tell(fails)
    outlet.close()
    assert closed == failed == ["released"]
    assert len(warnings) == 3


def test_a_user_who_interrupts_is_heard() -> None:
    def interrupted(target: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Outlet("runs/1", object()).tell(interrupted)


def test_nothing_is_composed_for_nobody() -> None:
    Outlet[str]("runs/1", None).tell(lambda target: pytest.fail(target))
