"""What a row looks like on the wire: its values, then its routing weights as raw bytes in extra columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def pack(rows: Tensor, weights: Tensor) -> Tensor:
    """[R, H] and [R, K] -> [R, H + K x (bytes of a weight / bytes of a value)], bit for bit.

    The dtype is that of the rows; float32 weights ride with 16-bit rows unrounded. Not to be added up: see
    :func:`unpack`.
    """
    return _Pack.apply(rows, weights)


def unpack(packed: Tensor, top_k: int, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`pack`: [R, C] -> rows [R, H] and weights [R, top_k]."""
    return _Unpack.apply(packed, top_k, weight_dtype)


def weight_dtype_on_wire(rows: torch.dtype, weights: torch.dtype) -> torch.dtype:
    """Weights are never narrower than a value, so that they fill whole columns."""
    return torch.promote_types(rows, weights)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.top_k, ctx.weight_dtype = weights.shape[1], weights.dtype
        return _join(rows, weights)

    @staticmethod
    def backward(ctx: Any, grad_packed: Tensor) -> tuple[Tensor, Tensor]:
        return _split(grad_packed, ctx.top_k, ctx.weight_dtype)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, top_k: int, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return _split(packed, top_k, weight_dtype)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor, None, None]:
        return _join(grad_rows, grad_weights), None, None


def _join(rows: Tensor, weights: Tensor) -> Tensor:
    return torch.cat([rows, weights.contiguous().view(rows.dtype)], 1)


def _split(packed: Tensor, top_k: int, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_columns = top_k * weight_dtype.itemsize // packed.element_size()
    values = packed[:, : packed.shape[1] - num_columns]
    return values, packed[:, packed.shape[1] - num_columns :].contiguous().view(weight_dtype)
