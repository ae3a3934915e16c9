"""What each expert of a layer was given lately, and what it is expected to get next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ExpertLoad:
    """The decayed mean of a layer's token counts per optimizer step.

    Both sums below decay alike, so the mean is right from the first step on: it is the bias-corrected average of Adam.
    All ranks feed it the same integers, and multiply and add element by element: they hold the same bits.

    Attributes:
        half_life: optimizer steps after which a count weighs half.
        decayed_counts: [E] float64, read-only: counts of all steps so far, each decayed by its age.
        decayed_steps: how many steps that is, decayed alike.
    """

    half_life: float
    decayed_counts: FloatArray
    decayed_steps: float = 0.0

    def __post_init__(self) -> None:
        assert self.half_life > 0, self.half_life
        counts = np.array(self.decayed_counts, dtype=np.float64)
        assert counts.ndim == 1, counts.shape
        counts.setflags(write=False)
        object.__setattr__(self, "decayed_counts", counts)

    @classmethod
    def unknown(cls, num_experts: int, *, half_life: float) -> ExpertLoad:
        """Of a layer that has not run yet."""
        return cls(half_life, np.zeros(num_experts))

    def after(self, counts: npt.ArrayLike) -> ExpertLoad:
        """With one more step: ``counts`` [E] int64 are the (token, choice) pairs of all ranks, by logical expert."""
        new = np.asarray(counts, dtype=np.float64)
        assert new.shape == self.decayed_counts.shape, (new.shape, self.decayed_counts.shape)
        decay = 0.5 ** (1 / self.half_life)
        return ExpertLoad(self.half_life, decay * self.decayed_counts + new, decay * self.decayed_steps + 1)

    @property
    def forecast(self) -> FloatArray:
        """[E] float64: pairs that each expert is expected to get in a step of the next window; 0 before the first."""
        return self.decayed_counts / max(self.decayed_steps, 1.0)

    def to_json(self) -> dict[str, Any]:
        """Numbers that JSON keeps to the last bit."""
        return {
            "decayed_counts": self.decayed_counts.tolist(),
            "decayed_steps": self.decayed_steps,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any], *, half_life: float) -> ExpertLoad:
        """What :meth:`to_json` gave, to go on with this half-life."""
        return cls(half_life, np.array(state["decayed_counts"]), state["decayed_steps"])
