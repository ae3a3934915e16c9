"""Counts the bytes that leave this rank, and the bytes that had to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hybrid.dispatch.arrived import Arrived, Experts
from ds_hybrid.dispatch.modes import Mode
from ds_hybrid.dispatch.stopwatch import Stopwatch


@dataclass(frozen=True)
class WireBytes:
    """Bytes that left this rank for others since the meter was last read, forward and backward; and what else it saw.

    Attributes:
        payload: rows of tokens and gradients, and the routing weights that ride with them; recomputation included.
        metadata: routing ids, row counts and agreement headers.
        by_mode: the two together, by the mode that sent them.
        lower_bound: rows that had to cross, times their bytes: each token once to each other rank that holds one of
            its experts, one row back, and the same again in backward.
        num_tokens: tokens routed.
        num_arrived: tokens that reached this rank's experts, its own among them; in mode ``alltoall`` once for each
            choice.
        exposed_seconds: how long this rank stood still for messages, slower ranks' delay included.
        expert_seconds: how long its experts took in training's forward, recomputation apart.

    Per rank, ``payload`` may fall below ``lower_bound`` (a combine sends rows of other ranks' tokens): compare sums
    over the ranks of a group.
    """

    payload: int
    metadata: int
    by_mode: Mapping[Mode, int]
    lower_bound: int
    num_tokens: int
    num_arrived: int
    exposed_seconds: float
    expert_seconds: float


class Meter:
    """Adds up the traffic of one layer on one rank.

    Attributes:
        mode: which dispatcher sends.
        exposed: runs while this rank waits for a message.
        computing: runs while its experts do, in training's forward, recomputation apart.
    """

    def __init__(self, mode: Mode = "alltoall") -> None:
        self.mode: Mode = mode
        self.exposed = Stopwatch()
        self.computing = Stopwatch()
        self._start_anew()

    def _start_anew(self) -> None:
        self._payload = 0
        self._metadata = 0
        self._by_mode: Counter[Mode] = Counter()
        self._num_tokens = 0
        self._num_arrived = 0
        self._lower_bound: Tensor | None = None

    def timed(self, experts: Experts, *, training: bool) -> Experts:
        """The same experts; in training, but for recomputation, ``computing`` runs while they do."""
        if not training or is_recomputing():
            return experts

        def run(arrived: Arrived) -> Tensor:
            with self.computing:
                return experts(arrived)

        return run

    def add_payload(self, num_bytes: int) -> None:
        self._payload += num_bytes
        self._by_mode[self.mode] += num_bytes

    def add_metadata(self, num_bytes: int) -> None:
        self._metadata += num_bytes
        self._by_mode[self.mode] += num_bytes

    def add_tokens(self, num_tokens: int) -> None:
        """Count routed tokens, once where activation checkpointing repeats a forward."""
        self._num_tokens += num_tokens

    def add_arrived(self, num_tokens: int) -> None:
        """Count tokens that reached this rank's experts, likewise once."""
        self._num_arrived += num_tokens

    def add_lower_bound(self, num_bytes: Tensor) -> None:
        """Add a count that lives on the device; it is read back only by :meth:`read`."""
        self._lower_bound = num_bytes if self._lower_bound is None else self._lower_bound + num_bytes

    def take(self) -> WireBytes:
        """The totals since the last time. Waits for the device."""
        lower_bound = 0 if self._lower_bound is None else int(self._lower_bound)
        taken = WireBytes(
            self._payload,
            self._metadata,
            self._by_mode,
            lower_bound,
            self._num_tokens,
            self._num_arrived,
            self.exposed.take(),
            self.computing.take(),
        )
        self._start_anew()
        return taken


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward, as both kinds of activation checkpointing run it again."""
    return torch._C._current_graph_task_id() != -1


def crossing(rows: Tensor, num_rows_needed: Tensor, meter: Meter) -> Tensor:
    """The identity, which adds one one-way crossing to the lower bound in forward and another in backward.

    Stands right before the exchange, so that both are repeated, or not, when activation checkpointing recomputes.

    Args:
        rows: [*, H], what crosses.
        num_rows_needed: [] int64 on the device of ``rows``, how many rows had to cross.
    """
    return _Crossing.apply(rows, num_rows_needed, meter)


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_rows_needed: Tensor, meter: Meter) -> Tensor:
        ctx.num_bytes = num_rows_needed * (rows.shape[1] * rows.element_size())
        ctx.meter = meter
        meter.add_lower_bound(ctx.num_bytes)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None, None]:
        ctx.meter.add_lower_bound(ctx.num_bytes)
        return grad_rows, None, None
