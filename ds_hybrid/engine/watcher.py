"""What an engine tells of its training while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from ds_hybrid.dispatch.choose import DispatcherChange
from ds_hybrid.observe.compose import Progress
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.look import Look
from ds_hybrid.rebalance.migrate import MoveReport


class Watcher:
    """What an engine calls, on all ranks after the same steps. This one does nothing: nobody watches.

    :class:`ds_hybrid.engine.observer.Observer` watches.
    """

    def loss(self, loss: Tensor, *, is_part_of_step: bool = False) -> None:
        """Note what backward was given: the loss of a micro-batch, or its part of the loss of the step."""

    def work(self, name: str, phase: str) -> AbstractContextManager[None]:
        """Notes a work of the whole model where a timeline is wanted."""
        return nullcontext()

    def pause(self) -> None:
        """What follows until the next training forward is no training. Collective."""

    def after_step(self, progress: Progress, changes: Sequence[DispatcherChange], look: Look | None) -> None:
        """An optimizer step is over, dispatchers have changed and experts moved. Collective at each interval."""

    def moved(
        self, progress: Progress, targets: Mapping[str, ExpertPlacement], report: MoveReport, seconds: float
    ) -> None:
        """``engine.move_experts`` has moved experts."""

    def resumed(self, step: int, path: str) -> None:
        """A checkpoint was loaded: what comes now follows ``step``."""

    def close(self) -> None:
        """Nothing more is to come."""
