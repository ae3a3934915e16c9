"""What a row looks like on the wire: its values, then its routing weights, as bytes.

Weights ride with 16-bit rows in float32, unrounded. The wire carries bytes, because the bits of a weight read as 16-bit
floats may look like NaN to whoever checks for it.

Dispatch may round values for the wire, in forward only: gradients, and rows on their way home, travel as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_hybrid.dispatch.collectives import RankGroup, Transfer
from ds_hybrid.dispatch.exchanges import Exchange, RowsExchange
from ds_hybrid.dispatch.modes import FP8_BLOCK, WireDtype

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class EncodedRowsExchange(RowsExchange):
    """An all-to-all of rows that are encoded on their way out, in forward.

    Args:
        wire_dtype: how values travel in forward; ``"auto"`` as they are.
    """

    def __init__(
        self,
        group: RankGroup,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        wire_dtype: WireDtype = "auto",
    ) -> None:
        super().__init__(group, send_counts, receive_counts)
        self._wire_dtype = wire_dtype

    def send(self, *values: Tensor) -> Transfer:
        (rows,) = values
        self._hidden_size, self._dtype = rows.shape[1], rows.dtype
        return super().send(encode(rows, self._wire_dtype))

    def receive(self, arrived: Tensor) -> tuple[Tensor, ...]:
        return (decode(arrived, self._hidden_size, self._dtype, self._wire_dtype),)


class WeightedRowsExchange(EncodedRowsExchange):
    """The same for rows [sum(send_counts), H] with their weights [sum(send_counts), K] in one message."""

    def send(self, *values: Tensor) -> Transfer:
        rows, weights = values
        self._hidden_size, self._dtype = rows.shape[1], rows.dtype
        self._top_k, self._weight_dtype = weights.shape[1], weights.dtype
        packed = _join(encode(rows, self._wire_dtype), weights)
        return self._group.all_to_all(packed, self._send_counts, self._receive_counts)

    def receive(self, arrived: Tensor) -> tuple[Tensor, ...]:
        return self._split(arrived, self._wire_dtype)

    def send_back(self, *gradients: Tensor) -> Transfer:
        grad_rows, grad_weights = gradients
        packed = _join(encode(grad_rows, "auto"), grad_weights)
        return self._group.all_to_all(packed, self._receive_counts, self._send_counts)

    def receive_back(self, arrived: Tensor) -> tuple[Tensor, ...]:
        return self._split(arrived, "auto")

    def _split(self, wire: Tensor, wire_dtype: WireDtype) -> tuple[Tensor, Tensor]:
        num_riding = self._top_k * self._weight_dtype.itemsize
        values, riding = wire.split([wire.shape[1] - num_riding, num_riding], 1)
        # Weights are kept for backward: as a view they would keep the rows of the whole message alive.
        weights = _read(riding.clone(), self._weight_dtype)
        return decode(values, self._hidden_size, self._dtype, wire_dtype), weights


class GatherExchange(Exchange):
    """An all-gather of rows: [N, H], N equal on every rank -> [P * N, H]. Its adjoint sums at the source."""

    def __init__(self, group: RankGroup, wire_dtype: WireDtype = "auto") -> None:
        self._group = group
        self._wire_dtype = wire_dtype

    def send(self, *values: Tensor) -> Transfer:
        (rows,) = values
        self._hidden_size, self._dtype = rows.shape[1], rows.dtype
        return self._group.all_gather(encode(rows, self._wire_dtype))

    def receive(self, arrived: Tensor) -> tuple[Tensor, ...]:
        return (decode(arrived, self._hidden_size, self._dtype, self._wire_dtype),)

    def send_back(self, *gradients: Tensor) -> Transfer:
        return self._group.reduce_scatter(*gradients)


def encode(rows: Tensor, wire_dtype: WireDtype) -> Tensor:
    """Rows [R, H] as bytes: uint8 [R, B].

    fp8: one float32 scale per block of 128 values, largest magnitude / 448, after the values. A block of zeros comes
    back as zeros; a block that holds an infinity or NaN comes back as NaN throughout, so that neither goes unnoticed.
    """
    if wire_dtype == "fp8_e4m3":
        values, scales = _quantize(rows)
        return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], 1)
    return (rows.to(torch.bfloat16) if wire_dtype == "bf16" else rows).contiguous().view(torch.uint8)


def decode(wire: Tensor, hidden_size: int, dtype: torch.dtype, wire_dtype: WireDtype) -> Tensor:
    """The inverse of :func:`encode`: uint8 [R, B] -> rows [R, hidden_size] of ``dtype``."""
    if wire_dtype == "fp8_e4m3":
        values = _read(wire[:, :hidden_size], torch.float8_e4m3fn).float()
        scales = _read(wire[:, hidden_size:], torch.float32)
        return (values * scales.repeat_interleave(FP8_BLOCK, 1)[:, :hidden_size]).to(dtype)
    return _read(wire, torch.bfloat16 if wire_dtype == "bf16" else dtype).to(dtype)


def _join(values: Tensor, weights: Tensor) -> Tensor:
    return torch.cat([values, weights.contiguous().view(torch.uint8)], 1)


def _read(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [R, B] as values, in place where they lie aligned."""
    is_aligned = wire.stride(0) % dtype.itemsize == wire.storage_offset() % dtype.itemsize == 0
    return (wire if is_aligned else wire.clone(memory_format=torch.contiguous_format)).view(dtype)


def _quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 values [R, H] and float32 scales [R, ceil(H / 128)]."""
    num_rows, hidden_size = rows.shape
    num_blocks = -(-hidden_size // FP8_BLOCK)
    blocks = pad(rows.float(), (0, num_blocks * FP8_BLOCK - hidden_size)).view(num_rows, num_blocks, FP8_BLOCK)
    scales = blocks.abs().amax(-1) / _FP8_MAX
    # Not finite: the whole block becomes NaN. Zero, or so small that 1 / scale overflows: any scale will do.
    scales = torch.where(scales.isfinite(), scales, torch.nan).clamp_min(torch.finfo(torch.float32).tiny)
    values = (blocks / scales[..., None]).to(torch.float8_e4m3fn).flatten(1)
    return values[:, :hidden_size].contiguous(), scales
