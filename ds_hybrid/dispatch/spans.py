"""Notes of when a rank's works begin and end, in the steps of which a timeline is wanted.

In the other steps layers have :data:`SILENT`, which costs nothing. Backward is seen through marks: identities whose own
backward notes that gradients have come to that place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hybrid.dispatch.steps import Steps
from ds_hybrid.dispatch.stopwatch import Instant, instant

Result = TypeVar("Result")


@dataclass(frozen=True)
class Note:
    """A work that has ended.

    Attributes:
        name, phase: see :class:`ds_hybrid.observe.events.Span`.
        layer: the layer's number; -1 for the whole model.
        begin, end: see :func:`ds_hybrid.dispatch.stopwatch.instant`.
    """

    name: str
    phase: str
    layer: int
    begin: Instant
    end: Instant


class SpanLog:
    """What one rank does in one step, as :class:`Note` in the order of their ends."""

    def __init__(self) -> None:
        self.notes: list[Note] = []

    def add(self, name: str, phase: str, layer: int, begin: Instant) -> None:
        """Note a work that ends now."""
        self.notes.append(Note(name, phase, layer, begin, instant()))


class Spans:
    """Where a layer's works go when nobody wants to see them."""

    def work(self, name: str) -> AbstractContextManager[None]:
        """Notes a work of forward."""
        return nullcontext()

    def back(self, name: str) -> AbstractContextManager[None]:
        """Notes a work of backward that runs as one."""
        return nullcontext()

    def steps(self, name: str, work: Steps[Result]) -> Steps[Result]:
        """The same work, noted between each two of its pauses."""
        return work

    def waiting(self, watch: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Runs ``watch``, and notes a wait for a message."""
        return watch

    def trail(self) -> Trail:
        """What marks one call's way back."""
        return Trail()


class Trail:
    """Marks that leave no trace."""

    def mark(self, tensor: Tensor, *, ends: str | None = None, begins: str | None = None) -> Tensor:
        """The identity. When backward comes by, it ends one work and begins another."""
        return tensor


SILENT = Spans()


class LayerSpans(Spans):
    """The works of one layer, noted in ``log``."""

    def __init__(self, log: SpanLog, layer: int) -> None:
        self._log = log
        self._layer = layer

    def work(self, name: str) -> AbstractContextManager[None]:
        return self._noted(name, "recompute" if is_in_backward() else "forward")

    def back(self, name: str) -> AbstractContextManager[None]:
        return self._noted(name, "backward")

    @contextmanager
    def _noted(self, name: str, phase: str) -> Iterator[None]:
        begin = instant()
        try:
            yield
        finally:
            self._log.add(name, phase, self._layer, begin)

    def steps(self, name: str, work: Steps[Result]) -> Steps[Result]:
        try:
            while True:
                with self.work(name):
                    try:
                        next(work)
                    except StopIteration as end:
                        return end.value
                yield
        finally:
            work.close()

    @contextmanager
    def waiting(self, watch: AbstractContextManager[None]) -> Iterator[None]:
        begin = instant()
        try:
            with watch:
                yield
        finally:
            self._log.add("wait", "backward" if is_in_backward() else "forward", self._layer, begin)

    def trail(self) -> Trail:
        return _LayerTrail(self._log, self._layer)


class _LayerTrail(Trail):
    def __init__(self, log: SpanLog, layer: int) -> None:
        self._log = log
        self._layer = layer
        self._begun: dict[str, Instant] = {}

    def mark(self, tensor: Tensor, *, ends: str | None = None, begins: str | None = None) -> Tensor:
        marked: Tensor = _Mark.apply(tensor, self, ends, begins)
        return marked

    def pass_by(self, ends: str | None, begins: str | None) -> None:
        """Gradients have come to a mark."""
        if ends in self._begun:
            self._log.add(ends, "backward", self._layer, self._begun.pop(ends))
        if begins is not None:
            self._begun[begins] = instant()


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, trail: _LayerTrail, ends: str | None, begins: str | None) -> Tensor:
        ctx.trail, ctx.works = trail, (ends, begins)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.trail.pass_by(*ctx.works)
        return gradient, None, None, None


def is_in_backward() -> bool:
    """Whether autograd runs a backward on this thread. A forward in one is a recomputation."""
    return torch._C._current_graph_task_id() != -1
