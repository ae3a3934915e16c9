"""Keys and values on their way: how they are packed, and exchanges that leave the compute stream alone.

On CUDA everything that has to do with a message (packing, sending, waiting, summing) is queued on a stream of high
priority; the compute stream only waits for an event when it needs what came. On a CPU the backend's threads carry the
message, and the wait is the host's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hybrid.attention.traffic import head_wire_bytes
from ds_hybrid.dispatch.collectives import RankGroup, Transfer
from ds_hybrid.dispatch.modes import WireDtype
from ds_hybrid.dispatch.wire import decode, encode


@dataclass(frozen=True)
class KVFormat:
    """Keys or values of all heads, or both, as rows of bytes: one row for each token.

    Attributes:
        batch_size, num_heads: of each token.
        dims: values in a head of each part: of keys and of values.
        dtype: on the device.
        wire_dtype: on the wire.
    """

    batch_size: int
    num_heads: int
    dims: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: WireDtype = "auto"

    @property
    def row_bytes(self) -> int:
        return sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        heads = self.batch_size * self.num_heads
        return [heads * head_wire_bytes(dim, self.dtype.itemsize, self.wire_dtype) for dim in self.dims]

    def pack(self, *parts: Tensor) -> Tensor:
        """[B, KV, R, D] of each part -> uint8 [R, bytes]."""
        packed = [encode(_heads_as_rows(part), self.wire_dtype).view(part.shape[2], -1) for part in parts]
        return packed[0] if len(packed) == 1 else torch.cat(packed, 1)

    def unpack(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The inverse of :meth:`pack`; in place where nothing has to be computed."""
        parts = zip(rows.split(self._widths, 1), self.dims, strict=True)
        return tuple(self._values(part, dim) for part, dim in parts)

    def _values(self, part: Tensor, dim: int) -> Tensor:
        heads = self.batch_size * self.num_heads
        if self.wire_dtype == "fp8_e4m3":
            values = decode(part.reshape(len(part) * heads, -1), dim, self.dtype, self.wire_dtype)
        else:
            values = decode(part, heads * dim, self.dtype, self.wire_dtype)
        return values.view(len(part), self.batch_size, self.num_heads, dim).permute(1, 2, 0, 3)

    def join_gradients(self, *parts: Tensor) -> Tensor:
        """Gradients [B, KV, R, D] of each part -> [R, values]."""
        return torch.cat([part.permute(2, 0, 1, 3).reshape(part.shape[2], -1) for part in parts], 1)

    def split_gradients(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The inverse of :meth:`join_gradients`."""
        widths = [self.batch_size * self.num_heads * dim for dim in self.dims]
        return tuple(
            part.unflatten(1, (self.batch_size, self.num_heads, dim)).permute(1, 2, 0, 3)
            for part, dim in zip(rows.split(widths, 1), self.dims, strict=True)
        )


class Arrival:
    """A message under way."""

    def __init__(self, wait: Callable[[], Tensor]) -> None:
        self._wait = wait

    def wait(self) -> Tensor:
        """What came. On CUDA the compute stream waits, not the host."""
        return self._wait()


class Exchanges:
    """Starts exchanges of a group beside the compute stream of ``device``."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self.group = group
        self._stream: Any = None if device.type == "cpu" else get_accelerator().Stream(priority=-1)

    def gather(self, pack: Callable[[], Tensor], *read: Tensor) -> Arrival:
        """[R, C] of every rank -> [n * R, C]. ``pack`` makes the rows, from the tensors ``read``."""
        return self._start(pack, self.group.all_gather, read)

    def shift(self, pack: Callable[[], Tensor], *read: Tensor) -> Arrival:
        """[R, C] to the next rank, and from the previous one."""
        return self._start(pack, self.group.shift, read)

    def reduce_scatter(self, pack: Callable[[], Tensor], *read: Tensor) -> Arrival:
        """[n * R, C] -> [R, C], the sum of what all ranks have for this one."""
        return self._start(pack, self.group.reduce_scatter, read)

    def _start(
        self, pack: Callable[[], Tensor], send: Callable[[Tensor], Transfer], read: tuple[Tensor, ...]
    ) -> Arrival:
        if self._stream is None:
            return Arrival(send(pack()).wait)
        accelerator = get_accelerator()
        self._stream.wait_stream(accelerator.current_stream())
        for tensor in read:
            tensor.record_stream(self._stream)
        with accelerator.stream(self._stream):
            arrived = send(pack()).wait(timed=False)
            event = accelerator.Event()
            event.record(self._stream)

        def wait() -> Tensor:
            current = accelerator.current_stream()
            with self.group.meter.exposed:
                current.wait_event(event)
            arrived.record_stream(current)
            return arrived

        return Arrival(wait)


def _heads_as_rows(part: Tensor) -> Tensor:
    """[B, KV, R, D] -> [R * B * KV, D], token by token."""
    return part.permute(2, 0, 1, 3).reshape(-1, part.shape[3])
