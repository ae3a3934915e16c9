"""Work that pauses while a message is under way, and several such works woven into one another."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")

Steps = Generator[None, None, Result]
"""A generator that yields right after each departure and goes on with the arrival; its return value is the result."""


def run_staggered(works: Sequence[Steps[Result]]) -> list[Result]:
    """Run the works one step apart: in round r work w takes its step r - w, the latest work first.

    So what the later works have sent is under way while an earlier one computes. Every rank runs the same rounds.
    """
    results: dict[int, Result] = {}
    num_begun = 0
    try:
        while len(results) < len(works):
            num_begun = min(num_begun + 1, len(works))
            for number in reversed(range(num_begun)):
                if number not in results:
                    try:
                        next(works[number])
                    except StopIteration as end:
                        results[number] = end.value
    finally:
        # A work that failed, or a recomputation that has all it wanted, leaves the others where they pause.
        for work in works:
            work.close()
    return [results[number] for number in range(len(works))]
