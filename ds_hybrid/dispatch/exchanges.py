"""Differentiable exchanges of rows, each in two halves, so that other work fits between departure and arrival.

An exchange is a linear map whose backward is its adjoint, in two halves as well: the gradients depart when backward
reaches the arrival, and arrive when it reaches the departure. Autograd visits nodes in the reverse order of their
making, so what forward did between the halves, backward does between them too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hybrid.dispatch.collectives import RankGroup, Transfer
from ds_hybrid.dispatch.steps import Steps


class Exchange(ABC):
    """One exchange of one call; between departure and arrival it holds the transfer that is under way."""

    _under_way: Transfer | None = None

    @abstractmethod
    def send(self, *values: Tensor) -> Transfer:
        """Start the exchange of ``values``."""

    def receive(self, arrived: Tensor) -> tuple[Tensor, ...]:
        """What arrived, as values."""
        return (arrived,)

    @abstractmethod
    def send_back(self, *gradients: Tensor) -> Transfer:
        """Start the adjoint exchange of the received values' gradients."""

    def receive_back(self, arrived: Tensor) -> tuple[Tensor, ...]:
        """What arrived, as gradients of the sent values."""
        return (arrived,)

    def land(self) -> Tensor:
        """Wait for the transfer that is under way, and let go of it."""
        transfer, self._under_way = self._under_way, None
        assert transfer is not None
        return transfer.wait()

    def depart(self, *values: Tensor) -> Flight:
        """Start the exchange."""
        return Flight(self, _Depart.apply(self, *values))


@dataclass(frozen=True)
class Flight:
    """An exchange that has departed. ``ticket`` carries autograd's graph from departure to arrival."""

    exchange: Exchange
    ticket: Tensor

    def arrive(self) -> tuple[Tensor, ...]:
        """Wait for the exchange and give what was received."""
        return _Arrive.apply(self.exchange, self.ticket)


def under_way(*flights: Flight) -> Steps[None]:
    """One pause. A work that is closed there waits first, so that no message ends in memory that was given away."""
    try:
        yield
    except GeneratorExit:
        for flight in flights:
            flight.exchange.land()
        raise


class RowsExchange(Exchange):
    """An all-to-all of rows: [sum(send_counts), H] -> [sum(receive_counts), H]."""

    def __init__(self, group: RankGroup, send_counts: Sequence[int], receive_counts: Sequence[int]) -> None:
        self._group = group
        self._send_counts = send_counts
        self._receive_counts = receive_counts

    def send(self, *values: Tensor) -> Transfer:
        (rows,) = values
        return self._group.all_to_all(rows, self._send_counts, self._receive_counts)

    def send_back(self, *gradients: Tensor) -> Transfer:
        (grad_rows,) = gradients
        return self._group.all_to_all(grad_rows, self._receive_counts, self._send_counts)


class ReduceScatterExchange(Exchange):
    """The sum over the ranks, each keeps its part: [P * N, H] -> [N, H]. Its adjoint gathers."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def send(self, *values: Tensor) -> Transfer:
        return self._group.reduce_scatter(*values)

    def send_back(self, *gradients: Tensor) -> Transfer:
        return self._group.all_gather(*gradients)


class AllReduceExchange(Exchange):
    """The sum over the ranks, on every rank; what follows is the same on every rank, so the gradient just passes."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def send(self, *values: Tensor) -> Transfer:
        return self._group.all_reduce(*values)

    def send_back(self, *gradients: Tensor) -> Transfer:
        return Transfer(None, lambda: gradients[0])


class ShareExchange(Exchange):
    """Values that every rank has already; each uses its own part of them, so their gradients are summed."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def send(self, *values: Tensor) -> Transfer:
        return Transfer(None, lambda: values[0].view_as(values[0]))

    def send_back(self, *gradients: Tensor) -> Transfer:
        return self._group.all_reduce(*gradients)


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *values: Tensor) -> Tensor:
        ctx.exchange = exchange
        exchange._under_way = exchange.send(*values)
        return values[0].new_zeros(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _ticket: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.exchange.receive_back(ctx.exchange.land())


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, ticket: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.ticket_like = ticket.new_zeros(1)
        return exchange.receive(exchange.land())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        ctx.exchange._under_way = ctx.exchange.send_back(*gradients)
        return None, ctx.ticket_like
