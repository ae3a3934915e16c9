"""Works that pause, one step apart."""

from __future__ import annotations

import pytest

from ds_hybrid.dispatch.steps import Steps, run_staggered


def work(name: str, num_pauses: int, log: list[str]) -> Steps[str]:
    for number in range(num_pauses):
        log.append(f"{name}{number}")
        yield
    log.append(f"{name} ends")
    return name


def test_a_work_runs_to_its_end() -> None:
    log: list[str] = []
    assert run_staggered([work("a", 2, log)]) == ["a"]
    assert log == ["a0", "a1", "a ends"]


def test_the_latest_work_goes_first_in_each_round() -> None:
    log: list[str] = []
    assert run_staggered([work(name, 2, log) for name in "abc"]) == ["a", "b", "c"]
    rounds = [["a0"], ["b0", "a1"], ["c0", "b1", "a ends"], ["c1", "b ends"], ["c ends"]]
    assert log == [step for steps in rounds for step in steps]


def test_works_of_unequal_length_and_none() -> None:
    log: list[str] = []
    assert run_staggered([work("a", 0, log), work("b", 3, log)]) == ["a", "b"]
    assert run_staggered([]) == []


def test_a_work_that_fails_closes_the_others_where_they_pause() -> None:
    closed: list[str] = []

    def paused(name: str) -> Steps[None]:
        try:
            while True:
                yield
        finally:
            closed.append(name)

    def failing() -> Steps[None]:
        yield
        raise RuntimeError("as a recomputation that has all it wanted")

    with pytest.raises(RuntimeError, match="all it wanted"):
        run_staggered([paused("a"), failing(), paused("b")])
    assert closed == ["a", "b"]
