"""The routing of each optimizer step, kept on the device and summed over the ranks when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import deepspeed.comm as dist
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_hybrid.errors import ConfigError
from ds_hybrid.moe.kinds import MoELayer

MOST_PENDING = 1000
"""Steps that are kept before :meth:`RoutingCounts.take` is due."""


class RoutingCounts:
    """Counts training alone. All ranks call each method after the same steps.

    Args:
        layers: of the model, in one order on every rank.

    Raises:
        ConfigError: on every rank, when the layers have different numbers of experts.
    """

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        sizes = {layer.num_experts for layer in layers}
        if len(sizes) > 1:
            numbers = ", ".join(map(str, sorted(sizes)))
            raise ConfigError(
                f"ds_hybrid.observe.routing_trace = true: the model's layers have {numbers} experts, a trace has one "
                "number for all of them. Set it to false."
            )
        self._layers = layers
        (self._num_experts,) = sizes
        self._steps: list[int] = []
        self._totals = [self._total()]

    def after_step(self, step: int) -> None:
        """Keep what was routed since the last time as that of ``step``. Nothing waits."""
        self._steps.append(step)
        self._totals.append(self._total())

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= MOST_PENDING

    def take(self) -> tuple[list[int], npt.NDArray[np.int64]]:
        """The steps since the last time, and [steps, L, E] pairs of all ranks. Collective; waits for the device."""
        counts = torch.stack(self._totals).diff(dim=0)
        if len(counts):
            dist.all_reduce(counts)
        steps, self._steps, self._totals = self._steps, [], self._totals[-1:]
        found: npt.NDArray[np.int64] = counts.view(len(steps), len(self._layers), self._num_experts).cpu().numpy()
        return steps, found

    def skip(self) -> None:
        """Forget what was routed since the last time."""
        self._steps = []
        self._totals = [self._total()]

    def _total(self) -> Tensor:
        return torch.cat([layer.expert_load for layer in self._layers])
