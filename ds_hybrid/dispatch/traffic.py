"""Wire bytes of each dispatcher, exactly for a given routing and on average for a uniform one. Pure NumPy.

Bytes are those that leave a rank for others; forward is dispatch and combine, backward the same two in reverse.
Symbols: P ranks, E experts, K choices per token, H hidden size, T tokens of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_hybrid.dispatch.modes import Mode

_COUNT_BYTES = 8


@dataclass(frozen=True)
class WireShape:
    """What fixes the size of a message. ``*_bytes`` are bytes per element; ``num_facts`` is what the guard sends."""

    num_ranks: int
    num_experts: int
    top_k: int
    hidden_size: int
    value_bytes: int
    weight_bytes: int = 4
    num_facts: int = 5

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self.value_bytes

    @property
    def riding_bytes(self) -> int:
        """Bytes of one token's routing weights."""
        return self.top_k * self.weight_bytes

    @property
    def ids_bytes(self) -> int:
        """Bytes of one token's expert ids."""
        return self.top_k * id_bytes(self.num_experts)


@dataclass(frozen=True)
class Traffic:
    """Bytes that leave each rank in one forward or one backward of a layer: three [P] int64 arrays."""

    payload: npt.NDArray[np.int64]
    metadata: npt.NDArray[np.int64]
    lower_bound: npt.NDArray[np.int64]


def id_bytes(num_experts: int) -> int:
    """Bytes of the narrowest integer that holds every expert id."""
    return 1 if num_experts <= 2**8 else 2 if num_experts <= 2**15 else 4


def forward_traffic(mode: Mode, rank_of_choice: Sequence[npt.NDArray[np.int64]], shape: WireShape) -> Traffic:
    """The bytes of one forward.

    Args:
        rank_of_choice: for each of the P ranks a [T, K] array: the rank that holds each choice of its tokens.
    """
    return _traffic(mode, rank_of_choice, shape, backward=False)


def backward_traffic(mode: Mode, rank_of_choice: Sequence[npt.NDArray[np.int64]], shape: WireShape) -> Traffic:
    """The bytes of one backward: gradients retrace the rows, no metadata moves."""
    return _traffic(mode, rank_of_choice, shape, backward=True)


def expected_rows(mode: Mode, *, num_ranks: int, num_experts: int, top_k: int) -> float:
    """Rows that a rank sends off-rank per token, one way, when K of E experts are drawn uniformly.

    A token needs a rank that holds s experts with probability q(s) = 1 - C(E - s, K) / C(E, K).
    """
    if mode == "alltoall":
        return top_k * (num_ranks - 1) / num_ranks
    if mode == "allgather":
        return num_ranks - 1.0
    held = num_experts // num_ranks
    return (num_ranks - 1) * (1 - math.comb(num_experts - held, top_k) / math.comb(num_experts, top_k))


def expected_bytes(mode: Mode, shape: WireShape) -> float:
    """Forward bytes per token under uniform routing, without the headers that do not grow with T."""
    rows = expected_rows(mode, num_ranks=shape.num_ranks, num_experts=shape.num_experts, top_k=shape.top_k)
    if mode == "alltoall":
        return 2 * rows * shape.row_bytes
    return rows * (2 * shape.row_bytes + shape.riding_bytes) + (shape.num_ranks - 1) * shape.ids_bytes


def _traffic(
    mode: Mode, rank_of_choice: Sequence[npt.NDArray[np.int64]], shape: WireShape, *, backward: bool
) -> Traffic:
    distinct = _rows_between(rank_of_choice, shape.num_ranks, once_per_rank=True)
    longest = max(len(ranks) for ranks in rank_of_choice)
    peers = shape.num_ranks - 1
    if mode == "allgather":
        dispatched = combined = np.full(shape.num_ranks, longest * peers)
    else:
        rows = distinct if mode == "two_stage" else _rows_between(rank_of_choice, shape.num_ranks, once_per_rank=False)
        dispatched, combined = rows.sum(1), rows.sum(0)
    if backward:
        dispatched, combined = combined, dispatched

    ride_along = 0 if mode == "alltoall" else shape.riding_bytes
    if mode == "alltoall":
        metadata = _COUNT_BYTES * (shape.num_experts // shape.num_ranks + shape.num_facts) * peers
    else:
        metadata = (_COUNT_BYTES * (1 + shape.num_facts) + longest * shape.ids_bytes) * peers
    return Traffic(
        payload=dispatched * (shape.row_bytes + ride_along) + combined * shape.row_bytes,
        metadata=np.full(shape.num_ranks, 0 if backward else metadata),
        lower_bound=2 * distinct.sum(1) * shape.row_bytes,
    )


def _rows_between(
    rank_of_choice: Sequence[npt.NDArray[np.int64]], num_ranks: int, *, once_per_rank: bool
) -> npt.NDArray[np.int64]:
    """[P, P]: rows from rank i to rank j, none to itself."""
    chosen = [np.stack([(ranks == target).sum(1) for target in range(num_ranks)], axis=1) for ranks in rank_of_choice]
    rows = np.stack([(counts > 0 if once_per_rank else counts).sum(0) for counts in chosen])
    np.fill_diagonal(rows, 0)
    return rows.astype(np.int64)
