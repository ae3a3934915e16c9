"""What a row looks like on the wire: its values, then its routing weights, as bytes.

Weights ride with 16-bit rows in float32, unrounded. The wire carries bytes, because the bits of a weight read as 16-bit
floats may look like NaN to whoever checks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hybrid.dispatch.collectives import RankGroup


def exchange_weighted_rows(
    rows: Tensor, weights: Tensor, group: RankGroup, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """An all-to-all of rows with their weights in one message; gradients of both travel back the same way.

    Args:
        rows: [sum(send_counts), H], the first ``send_counts[0]`` of them for rank 0, and so on.
        weights: [sum(send_counts), K], of a dtype no narrower than that of the rows.

    Returns:
        Received rows [sum(receive_counts), H] and weights [sum(receive_counts), K].
    """
    return _ExchangeWeightedRows.apply(rows, weights, group, send_counts, receive_counts)


class _ExchangeWeightedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        group: RankGroup,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.send_counts, ctx.receive_counts = group, send_counts, receive_counts
        return _exchange(rows, weights, group, send_counts, receive_counts)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        back = _exchange(grad_rows, grad_weights, ctx.group, ctx.receive_counts, ctx.send_counts)
        return *back, None, None, None


def _exchange(
    rows: Tensor, weights: Tensor, group: RankGroup, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    columns_of_weights = weights.contiguous().view(rows.dtype)
    packed = torch.cat([rows, columns_of_weights], 1).view(torch.uint8)
    received = group.all_to_all(packed, send_counts, receive_counts).view(rows.dtype)
    values, columns = received.split([rows.shape[1], columns_of_weights.shape[1]], 1)
    return values, columns.contiguous().view(weights.dtype)
