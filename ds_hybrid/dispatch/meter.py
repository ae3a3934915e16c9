"""Counts the bytes that leave this rank, and those that had to; training's apart from evaluation's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hybrid.dispatch.arrived import Arrived, Experts
from ds_hybrid.dispatch.modes import Sender
from ds_hybrid.dispatch.spans import SILENT, Spans, is_in_backward
from ds_hybrid.dispatch.stopwatch import Stopwatch


@dataclass(frozen=True)
class WireBytes:
    """Bytes that left this rank for others in some time, forward and backward; and what else the meter saw.

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

    payload: int = 0
    metadata: int = 0
    by_mode: Mapping[Sender, int] = field(default_factory=dict)
    lower_bound: int = 0
    num_tokens: int = 0
    num_arrived: int = 0
    exposed_seconds: float = 0.0
    expert_seconds: float = 0.0

    def since(self, before: WireBytes) -> WireBytes:
        """What came between two totals."""
        by_mode = Counter(self.by_mode)
        by_mode.subtract(before.by_mode)
        return WireBytes(
            self.payload - before.payload,
            self.metadata - before.metadata,
            {mode: sent for mode, sent in by_mode.items() if sent},
            self.lower_bound - before.lower_bound,
            self.num_tokens - before.num_tokens,
            self.num_arrived - before.num_arrived,
            self.exposed_seconds - before.exposed_seconds,
            self.expert_seconds - before.expert_seconds,
        )


class Meter:
    """Adds up the traffic of one layer on one rank.

    Attributes:
        mode: who sends.
        computing: runs while its experts do, in training's forward, recomputation apart.
        watched_by: where the works of training's calls are noted.
    """

    def __init__(self, mode: Sender = "alltoall") -> None:
        self.mode: Sender = mode
        self.computing = Stopwatch()
        self.watched_by = SILENT
        self._training, self._evaluation = _Account(), _Account()
        self._forwards_are_training = True
        self._taken = WireBytes()

    def begin(self, *, training: bool) -> None:
        """A forward begins. What a backward sends is training's in any case."""
        self._forwards_are_training = training

    @property
    def _is_training(self) -> bool:
        return self._forwards_are_training or is_in_backward()

    @property
    def _account(self) -> _Account:
        return self._training if self._is_training else self._evaluation

    @property
    def exposed(self) -> AbstractContextManager[None]:
        """Runs while this rank waits for a message."""
        return self.spans.waiting(self._account.exposed)

    @property
    def spans(self) -> Spans:
        """Where the works of the present call are noted."""
        return self.watched_by if self._is_training else SILENT

    def timed(self, experts: Experts, *, training: bool) -> Experts:
        """The same experts; in training, but for recomputation, ``computing`` runs while they do."""
        if not training or is_in_backward():
            return experts

        def run(arrived: Arrived) -> Tensor:
            with self.computing:
                return experts(arrived)

        return run

    def add_payload(self, num_bytes: int) -> None:
        account = self._account
        account.payload += num_bytes
        account.by_mode[self.mode] += num_bytes

    def add_metadata(self, num_bytes: int) -> None:
        account = self._account
        account.metadata += num_bytes
        account.by_mode[self.mode] += num_bytes

    def add_tokens(self, num_tokens: int) -> None:
        """Count routed tokens, once where activation checkpointing repeats a forward."""
        self._account.num_tokens += num_tokens

    def add_arrived(self, num_tokens: int) -> None:
        """Count tokens that reached this rank's experts, likewise once."""
        self._account.num_arrived += num_tokens

    def add_lower_bound(self, num_bytes: Tensor) -> None:
        """Add a count that lives on the device; it is read back only with the totals."""
        account = self._account
        account.lower_bound = num_bytes if account.lower_bound is None else account.lower_bound + num_bytes

    def training_total(self) -> WireBytes:
        """Of training, since the beginning. Waits for the device."""
        return self._total(self._training)

    def total(self) -> WireBytes:
        """Of training and evaluation, since the beginning. Waits for the device."""
        return self._total(self._training, self._evaluation)

    def take(self) -> WireBytes:
        """:meth:`total`, since the last time."""
        total = self.total()
        since, self._taken = total.since(self._taken), total
        return since

    def _total(self, *accounts: _Account) -> WireBytes:
        by_mode: Counter[Sender] = Counter()
        for account in accounts:
            by_mode.update(account.by_mode)
        return WireBytes(
            payload=sum(account.payload for account in accounts),
            metadata=sum(account.metadata for account in accounts),
            by_mode=by_mode,
            lower_bound=sum(int(account.lower_bound) for account in accounts if account.lower_bound is not None),
            num_tokens=sum(account.num_tokens for account in accounts),
            num_arrived=sum(account.num_arrived for account in accounts),
            exposed_seconds=sum(account.exposed.total() for account in accounts),
            expert_seconds=self.computing.total(),
        )


@dataclass
class _Account:
    """What is added up; see :class:`WireBytes`."""

    payload: int = 0
    metadata: int = 0
    by_mode: Counter[Sender] = field(default_factory=Counter)
    num_tokens: int = 0
    num_arrived: int = 0
    lower_bound: Tensor | None = None
    exposed: Stopwatch = field(default_factory=Stopwatch)


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
