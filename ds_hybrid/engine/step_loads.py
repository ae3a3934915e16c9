"""The token counts of each optimizer step over all ranks, read one step late so that nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed.comm as dist
import numpy as np
import numpy.typing as npt
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hybrid.moe.kinds import MoELayer

Counts = list[npt.NDArray[np.int64]]
"""[E] for each layer: the (token, choice) pairs that chose each logical expert."""


class StepLoads:
    """Counts training alone, all micro-batches of a step together, and a recomputed forward once.

    All ranks call each method after the same steps.

    Args:
        layers: of the model, in one order on every rank.
    """

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self._layers = layers
        self._sizes = [layer.num_experts for layer in layers]
        self._under_way: _Copy | None = None
        self._seen = np.zeros(sum(self._sizes), dtype=np.int64)

    def after_step(self) -> Counts | None:
        """Send this step's counts on their way; those of the step before, unless :meth:`settle` has given them."""
        before = self.settle()
        total = torch.cat([layer.expert_load for layer in self._layers])
        dist.all_reduce(total)
        self._under_way = _Copy(total)
        return before

    def settle(self) -> Counts | None:
        """What is under way, if anything is. Waits for the device."""
        if self._under_way is None:
            return None
        total = self._under_way.wait()
        self._under_way = None
        since, self._seen = total - self._seen, total
        return np.split(since, np.cumsum(self._sizes)[:-1])


class _Copy:
    """Values on their way from the device to the host."""

    def __init__(self, values: Tensor) -> None:
        accelerator = get_accelerator()
        self._event: Any = None
        if accelerator.is_synchronized_device():
            self._values = values
            return
        self._values = accelerator.pin_memory(torch.empty(values.shape, dtype=values.dtype))
        self._values.copy_(values, non_blocking=True)
        self._event = accelerator.Event()
        self._event.record()

    def wait(self) -> npt.NDArray[np.int64]:
        if self._event is not None:
            self._event.synchronize()
        found: npt.NDArray[np.int64] = self._values.numpy().copy()
        return found
