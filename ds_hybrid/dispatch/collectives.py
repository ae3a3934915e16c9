"""The exchanges of a group of ranks, counted. Those of rows are under way when they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed.comm as dist
import torch
import torch.distributed as torch_dist
from torch import Tensor

from ds_hybrid.dispatch.meter import Meter


class Transfer:
    """An exchange of rows under way.

    Args:
        work: what to wait for, None when all is there.
        result: gives the received rows once it is there.
        sent: kept alive until then.
        exposed: runs during the wait.
    """

    def __init__(
        self,
        work: Any,
        result: Callable[[], Tensor],
        sent: Tensor | None = None,
        exposed: AbstractContextManager[None] | None = None,
    ) -> None:
        self._exposed = exposed or nullcontext()
        self._work = work
        self._result = result
        self._sent = sent

    def wait(self, *, timed: bool = True) -> Tensor:
        """The received rows. On CUDA the current stream waits, not the host.

        Args:
            timed: whether ``exposed`` runs; not where a stream waits that computes nothing.
        """
        if self._work is not None:
            with self._exposed if timed else nullcontext():
                self._work.wait()
        self._sent = None
        return self._result()


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
        return self._all_gather(tensor[None]).wait()

    def all_to_all_metadata(self, tensor: Tensor) -> Tensor:
        """[P, ...]: row p goes to rank p -> [P, ...]: row p came from rank p."""
        self.meter.add_metadata(_num_bytes(tensor) // self.size * (self.size - 1))
        return self._all_to_all(tensor, None, None).wait()

    def all_to_all(self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Transfer:
        """Send the first ``send_counts[0]`` rows to rank 0, and so on. [sum(send), C] -> [sum(receive), C]."""
        num_leaving = sum(send_counts) - send_counts[self.rank]
        self.meter.add_payload(num_leaving * rows.shape[1] * rows.element_size())
        return self._all_to_all(rows, send_counts, receive_counts)

    def all_gather(self, rows: Tensor) -> Transfer:
        """[N, C], N equal on every rank -> [P * N, C], rank 0's rows first."""
        self.meter.add_payload(_num_bytes(rows) * (self.size - 1))
        return self._all_gather(rows)

    def reduce_scatter(self, rows: Tensor) -> Transfer:
        """Sum over the ranks, each keeps its part. [P * N, C] -> [N, C].

        gloo's own reduce-scatter sends every byte twice, so on the CPU this is an all-to-all and a float32 sum.
        """
        if self.size == 1:
            return Transfer(None, lambda: rows)
        parts = rows.reshape(self.size, len(rows) // self.size, rows.shape[1])
        self.meter.add_payload(_num_bytes(parts[0]) * (self.size - 1))
        if rows.device.type == "cpu":
            received = self._all_to_all(parts.flatten(1), None, None)
            exact = torch.promote_types(rows.dtype, torch.float32)
            return Transfer(None, lambda: received.wait().view_as(parts).sum(0, dtype=exact).to(rows.dtype))
        reduced = parts.new_empty(parts.shape[1:])
        sent = parts.flatten(0, 1).contiguous()
        work = dist.reduce_scatter_tensor(reduced, sent, group=self.process_group, async_op=True)
        return Transfer(work, lambda: reduced, sent, self.meter.exposed)

    def shift(self, rows: Tensor) -> Transfer:
        """To the next rank, the last one's to the first: [N, C], N equal on every rank -> the previous rank's."""
        if self.size == 1:
            return Transfer(None, lambda: rows)
        self.meter.add_payload(_num_bytes(rows))
        sent, received = rows.contiguous(), torch.empty_like(rows, memory_format=torch.contiguous_format)
        following, previous = (
            torch_dist.get_global_rank(self.process_group, (self.rank + step) % self.size) for step in (1, -1)
        )
        works = torch_dist.batch_isend_irecv(
            [
                torch_dist.P2POp(torch_dist.isend, sent, following, self.process_group),
                torch_dist.P2POp(torch_dist.irecv, received, previous, self.process_group),
            ]
        )
        return Transfer(_All(works), lambda: received, sent, self.meter.exposed)

    def all_reduce(self, values: Tensor) -> Transfer:
        """The sum over the ranks, on every rank; ``values`` stay. Counts what a ring moves: 2 (P-1)/P of the bytes."""
        if self.size == 1:
            return Transfer(None, lambda: values)
        self.meter.add_payload(2 * _num_bytes(values) * (self.size - 1) // self.size)
        total = values.clone()
        work = dist.all_reduce(total, group=self.process_group, async_op=True)
        return Transfer(work, lambda: total, exposed=self.meter.exposed)

    def _all_gather(self, rows: Tensor) -> Transfer:
        if self.size == 1:
            return Transfer(None, lambda: rows)
        sent = rows.contiguous()
        gathered = rows.new_empty((self.size * len(rows), *rows.shape[1:]))
        if not rows.numel():
            return Transfer(None, lambda: gathered)
        work = dist.all_gather_into_tensor(gathered, sent, group=self.process_group, async_op=True)
        return Transfer(work, lambda: gathered, sent, self.meter.exposed)

    def _all_to_all(
        self, rows: Tensor, send_counts: Sequence[int] | None, receive_counts: Sequence[int] | None
    ) -> Transfer:
        if self.size == 1:
            return Transfer(None, lambda: rows)
        sent = rows.contiguous()
        num_received = len(rows) if receive_counts is None else sum(receive_counts)
        received = rows.new_empty((num_received, *rows.shape[1:]))
        work = dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=None if receive_counts is None else list(receive_counts),
            input_split_sizes=None if send_counts is None else list(send_counts),
            group=self.process_group,
            async_op=True,
        )
        return Transfer(work, lambda: received, sent, self.meter.exposed)


class _All:
    """Several works, waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class LoneRank(RankGroup):
    """A group of one. It needs no process group and exchanges nothing."""

    def __init__(self, meter: Meter) -> None:
        self.process_group = None
        self.meter = meter
        self.size = 1
        self.rank = 0


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
