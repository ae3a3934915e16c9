"""The exchanges of an expert-parallel group, counted, and differentiable where rows travel.

Each differentiable exchange is a linear map whose backward is its adjoint: an all-to-all with the splits turned round,
and the pair all-gather / reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor

from ds_hybrid.dispatch.meter import Meter


class RankGroup:
    """The P ranks that exchange rows, this rank's place among them, and the meter of what leaves it.

    What describes rows counts as metadata, rows as payload. A group of one moves nothing.
    """

    def __init__(self, process_group: Any, meter: Meter) -> None:
        self.process_group = process_group
        self.meter = meter
        self.size: int = dist.get_world_size(group=process_group)
        self.rank: int = dist.get_rank(group=process_group)

    def all_gather_metadata(self, tensor: Tensor) -> Tensor:
        """[...] of one shape on every rank -> [P, ...]."""
        self.meter.add_metadata(_num_bytes(tensor) * (self.size - 1))
        return self._all_gather(tensor)

    def all_to_all_metadata(self, tensor: Tensor) -> Tensor:
        """[P, ...]: row p goes to rank p -> [P, ...]: row p came from rank p."""
        self.meter.add_metadata(_num_bytes(tensor) // self.size * (self.size - 1))
        return self._all_to_all(tensor, None, None)

    def all_to_all(self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Send the first ``send_counts[0]`` rows to rank 0, and so on. [sum(send), C] -> [sum(receive), C]."""
        num_leaving = sum(send_counts) - send_counts[self.rank]
        self.meter.add_payload(num_leaving * rows.shape[1] * rows.element_size())
        return self._all_to_all(rows, send_counts, receive_counts)

    def all_gather(self, rows: Tensor) -> Tensor:
        """[N, C], N equal on every rank -> [P * N, C], rank 0's rows first."""
        self.meter.add_payload(_num_bytes(rows) * (self.size - 1))
        return self._all_gather(rows).flatten(0, 1)

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """Sum over the ranks, each keeps its part. [P * N, C] -> [N, C].

        gloo's own reduce-scatter sends every byte twice, so on the CPU this is an all-to-all and a float32 sum.
        """
        if self.size == 1:
            return rows
        parts = rows.reshape(self.size, len(rows) // self.size, rows.shape[1])
        self.meter.add_payload(_num_bytes(parts[0]) * (self.size - 1))
        if rows.device.type == "cpu":
            received = self._all_to_all(parts, None, None)
            return received.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)
        reduced = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(reduced, parts.flatten(0, 1), group=self.process_group)
        return reduced

    def _all_gather(self, tensor: Tensor) -> Tensor:
        if self.size == 1:
            return tensor[None]
        gathered = tensor.new_empty(self.size * tensor.numel())
        if tensor.numel():
            dist.all_gather_into_tensor(gathered, tensor.reshape(-1), group=self.process_group)
        return gathered.view(self.size, *tensor.shape)

    def _all_to_all(
        self, rows: Tensor, send_counts: Sequence[int] | None, receive_counts: Sequence[int] | None
    ) -> Tensor:
        if self.size == 1:
            return rows
        num_received = len(rows) if receive_counts is None else sum(receive_counts)
        received = rows.new_empty((num_received, *rows.shape[1:]))
        dist.all_to_all_single(
            received,
            rows.contiguous(),
            output_split_sizes=None if receive_counts is None else list(receive_counts),
            input_split_sizes=None if send_counts is None else list(send_counts),
            group=self.process_group,
        )
        return received


def all_to_all_rows(
    rows: Tensor, group: RankGroup, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> Tensor:
    """:meth:`RankGroup.all_to_all` with a gradient: rows of gradient travel back the way the rows came."""
    return _AllToAll.apply(rows, group, send_counts, receive_counts)


def all_gather_rows(rows: Tensor, group: RankGroup) -> Tensor:
    """:meth:`RankGroup.all_gather` with a gradient: the ranks' gradients of a row are summed at its source."""
    return _AllGather.apply(rows, group)


def reduce_scatter_rows(rows: Tensor, group: RankGroup) -> Tensor:
    """:meth:`RankGroup.reduce_scatter` with a gradient: every rank receives the gradient of every sum."""
    return _ReduceScatter.apply(rows, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: RankGroup, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.send_counts, ctx.receive_counts = group, send_counts, receive_counts
        return group.all_to_all(rows, send_counts, receive_counts)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.all_to_all(grad_rows, ctx.receive_counts, ctx.send_counts), None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return group.all_gather(rows)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None]:
        return ctx.group.reduce_scatter(grad_rows), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return group.reduce_scatter(rows)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(grad_rows), None


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
