"""Which dispatcher a layer uses. Pure, so every rank that is given the same figures decides the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ds_hybrid.dispatch.modes import MODES, Mode
from ds_hybrid.dispatch.traffic import WireShape, expected_bytes

HYSTERESIS = 0.1
"""The part of the present mode's time that another one must save."""


@dataclass(frozen=True)
class DispatcherChange:
    """A layer's dispatcher before and after a choice, and the seconds of a forward and backward that decided it."""

    layer: str
    before: Mode
    after: Mode
    predicted: Mapping[Mode, float]

    @property
    def reason(self) -> str:
        """Why, in words."""
        table = ", ".join(f"{mode} {1000 * value:.3f}" for mode, value in self.predicted.items())
        return f"predicted ms of a forward and backward: {table}"


def candidates(mode: Mode | Literal["auto"], *, num_ranks: int, spans_nodes: bool) -> tuple[Mode, ...]:
    """The modes that a layer may use: one that is named, or for ``"auto"`` those that its group allows.

    In a group of one nothing travels: ``"hierarchical"`` needs no nodes there, and ``allgather`` copies no token.
    """
    if num_ranks == 1 and mode in ("auto", "hierarchical"):
        return ("allgather",)
    if mode != "auto":
        return (mode,)
    return (*MODES, "hierarchical") if spans_nodes else MODES


def choose_mode(shape: WireShape) -> Mode:
    """Before anything is measured: the mode with the fewest bytes under uniform routing, the simplest of equals."""
    return min(MODES, key=lambda mode: expected_bytes(mode, shape))


def decide(current: Mode, seconds: Mapping[Mode, float]) -> Mode:
    """The quickest mode, where it saves more than :data:`HYSTERESIS` of the present one's time; else that one."""
    quickest = min(seconds, key=lambda mode: seconds[mode])
    return quickest if seconds[quickest] < (1 - HYSTERESIS) * seconds[current] else current
