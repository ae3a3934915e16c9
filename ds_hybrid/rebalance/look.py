"""What came of a look at the load of layers: decided, done, and measured of what was done before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ds_hybrid.rebalance.policy import LayerOutlook

Outcome = Literal["moved", "dry_run", "too_costly", "stays", "failed", "off"]
"""See :data:`ds_hybrid.observe.events.Action`."""


@dataclass(frozen=True)
class Gain:
    """What the last move of a layer, after step ``moved_at``, should bring and brought; seconds per step."""

    layer: str
    moved_at: int
    predicted: float
    measured: float


@dataclass(frozen=True)
class Move:
    """Experts that came to other ranks.

    Attributes:
        layers: that were changed.
        num_moved: experts that changed their rank, in all of them.
        seconds: of the whole event on this rank.
        predicted_seconds: of the moves alone.
        bytes_sent: that left this rank.
    """

    layers: tuple[str, ...]
    num_moved: int
    seconds: float
    predicted_seconds: float
    bytes_sent: int


@dataclass(frozen=True)
class Look:
    """One look.

    Attributes:
        reason: why it ended so, in words.
        outlooks: of the layers that were looked at.
        gains: of moves that were measured now.
        move: what was moved, where ``outcome`` says so.
    """

    outcome: Outcome
    reason: str
    outlooks: Mapping[str, LayerOutlook] = field(default_factory=dict)
    gains: tuple[Gain, ...] = ()
    move: Move | None = None
