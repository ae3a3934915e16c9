"""Wire bytes of each dispatcher, exactly for a given routing and on average for a uniform one. Pure NumPy.

Bytes are those that leave a rank for others; forward is dispatch and combine, backward the same two in reverse.
Symbols: P ranks, E experts, K choices per token, H hidden size, T tokens of a rank, N nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_hybrid.dispatch.modes import FP8_BLOCK, NUM_FACTS, Mode, WireDtype
from ds_hybrid.dispatch.nodes import hops_over_nodes

IntArray = npt.NDArray[np.int64]

INTEGER_BYTES = 8


@dataclass(frozen=True)
class WireShape:
    """What fixes the size of a message. ``*_bytes`` are bytes per element; ``num_facts`` is what the guard sends."""

    num_ranks: int
    num_experts: int
    top_k: int
    hidden_size: int
    value_bytes: int
    weight_bytes: int = 4
    wire_dtype: WireDtype = "auto"
    num_facts: int = NUM_FACTS

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on its way home, and of a row of gradient."""
        return self.hidden_size * self.value_bytes

    @property
    def dispatched_row_bytes(self) -> int:
        """Bytes of a row on its way to an expert."""
        if self.wire_dtype == "fp8_e4m3":
            return self.hidden_size + 4 * math.ceil(self.hidden_size / FP8_BLOCK)
        return self.hidden_size * 2 if self.wire_dtype == "bf16" else self.row_bytes

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

    payload: IntArray
    metadata: IntArray
    lower_bound: IntArray


def forward_traffic(
    mode: Mode, rank_of_choice: Sequence[IntArray], shape: WireShape, *, node_of_rank: Sequence[int] = ()
) -> Traffic:
    """The bytes of one forward.

    Args:
        rank_of_choice: for each of the P ranks a [T, K] array: the rank that holds each choice of its tokens.
        node_of_rank: the node of each of the P ranks, 0 to N-1; for ``hierarchical``.
    """
    if mode == "replicated":
        return _replicated_traffic(len(rank_of_choice[0]), shape, backward=False)
    rows = _rows(mode, rank_of_choice, shape, node_of_rank)
    riding = 0 if mode == "alltoall" else shape.riding_bytes
    return Traffic(
        payload=rows.dispatched * (shape.dispatched_row_bytes + riding) + rows.combined * shape.row_bytes,
        metadata=rows.metadata,
        lower_bound=_lower_bound(rank_of_choice, shape),
    )


def backward_traffic(
    mode: Mode, rank_of_choice: Sequence[IntArray], shape: WireShape, *, node_of_rank: Sequence[int] = ()
) -> Traffic:
    """The bytes of one backward: gradients retrace the rows, no metadata moves. Arguments as above."""
    if mode == "replicated":
        return _replicated_traffic(len(rank_of_choice[0]), shape, backward=True)
    rows = _rows(mode, rank_of_choice, shape, node_of_rank)
    riding = 0 if mode == "alltoall" else shape.riding_bytes
    return Traffic(
        payload=rows.dispatched * shape.row_bytes + rows.combined * (shape.row_bytes + riding),
        metadata=np.zeros_like(rows.metadata),
        lower_bound=_lower_bound(rank_of_choice, shape),
    )


def expected_rows(mode: Mode, *, num_ranks: int, num_experts: int, top_k: int, num_nodes: int = 1) -> float:
    """Rows that a rank sends off-rank per token, one way, when K of E experts are drawn uniformly.

    A token needs a rank that holds s experts with probability q(s) = 1 - C(E - s, K) / C(E, K). ``hierarchical`` sends
    (N-1) q(E/N) rows across nodes and (P-N) q(E/P) inside them.
    """

    def chance(num_held: int) -> float:
        return 1 - math.comb(num_experts - num_held, top_k) / math.comb(num_experts, top_k)

    match mode:
        case "alltoall":
            return top_k * (num_ranks - 1) / num_ranks
        case "allgather":
            return num_ranks - 1.0
        case "two_stage":
            return (num_ranks - 1) * chance(num_experts // num_ranks)
        case "hierarchical":
            across = (num_nodes - 1) * chance(num_experts // num_nodes)
            return across + (num_ranks - num_nodes) * chance(num_experts // num_ranks)
        case "replicated":
            return 0.0


def expected_bytes(mode: Mode, shape: WireShape) -> float:
    """Forward bytes per token of one of ``MODES`` under uniform routing, without the headers, which T does not grow."""
    rows = expected_rows(mode, num_ranks=shape.num_ranks, num_experts=shape.num_experts, top_k=shape.top_k)
    both_ways = shape.dispatched_row_bytes + shape.row_bytes
    if mode == "alltoall":
        return rows * both_ways
    return rows * (both_ways + shape.riding_bytes) + (shape.num_ranks - 1) * shape.ids_bytes


def id_bytes(num_experts: int) -> int:
    """Bytes of the narrowest integer that holds every expert id."""
    return 1 if num_experts <= 2**8 else 2 if num_experts <= 2**15 else 4


@dataclass(frozen=True)
class _Rows:
    """Rows that leave each rank in dispatch and in combine, and the bytes of metadata before: three [P] arrays."""

    dispatched: IntArray
    combined: IntArray
    metadata: IntArray


def _rows(mode: Mode, rank_of_choice: Sequence[IntArray], shape: WireShape, node_of_rank: Sequence[int]) -> _Rows:
    num_ranks, peers = shape.num_ranks, shape.num_ranks - 1
    if mode == "alltoall":
        rows = np.stack([np.bincount(ranks.ravel(), minlength=num_ranks) for ranks in rank_of_choice])
        np.fill_diagonal(rows, 0)
        metadata = INTEGER_BYTES * (shape.num_experts // num_ranks + shape.num_facts) * peers
        return _Rows(rows.sum(1), rows.sum(0), np.full(num_ranks, metadata))
    if mode == "allgather":
        longest = max(len(ranks) for ranks in rank_of_choice)
        rows = np.full(num_ranks, longest * peers)
        metadata = (INTEGER_BYTES * (1 + shape.num_facts) + longest * shape.ids_bytes) * peers
        return _Rows(rows, rows, np.full(num_ranks, metadata))
    everywhere = np.tile(np.arange(num_ranks), (num_ranks, 1))
    if mode == "two_stage":
        return _rows_over_hops(rank_of_choice, [everywhere], shape)
    return _rows_over_hops(rank_of_choice, hops_over_nodes(node_of_rank), shape)


def _rows_over_hops(rank_of_choice: Sequence[IntArray], hops: Sequence[IntArray], shape: WireShape) -> _Rows:
    """Follow every row. ``hops`` are [P, P]: the rank to which rank i hands a row that is bound for rank j, or -1."""
    num_ranks, held = shape.num_ranks, list(rank_of_choice)
    dispatched, combined = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    metadata = np.full(num_ranks, INTEGER_BYTES * (1 + shape.num_facts) * (num_ranks - 1))
    for number, hop in enumerate(hops):
        arriving: list[list[IntArray]] = [[] for _ in range(num_ranks)]
        for source, rows in enumerate(held):
            members = np.unique(hop[source][hop[source] >= 0])
            longest = max(len(held[member]) for member in members)
            count_bytes = INTEGER_BYTES if number else 0
            metadata[source] += (count_bytes + longest * shape.ids_bytes) * (len(members) - 1)
            for target in members:
                going = rows[(hop[source][rows] == target).any(1)]
                arriving[target].append(going)
                if target != source:
                    dispatched[source] += len(going)
                    combined[target] += len(going)
        held = [np.concatenate(parts) for parts in arriving]
    return _Rows(dispatched, combined, metadata)


def _lower_bound(rank_of_choice: Sequence[IntArray], shape: WireShape) -> IntArray:
    """One row out and one back for each (token, other rank that holds one of its experts)."""
    needed = [
        sum(np.count_nonzero((ranks == other).any(1)) for other in range(shape.num_ranks) if other != rank)
        for rank, ranks in enumerate(rank_of_choice)
    ]
    return np.array(needed, dtype=np.int64) * 2 * shape.row_bytes


def _replicated_traffic(num_tokens: int, shape: WireShape, *, backward: bool) -> Traffic:
    """An all-reduce of the output; in backward of the tokens' gradients, and of the weights'. A ring's bytes."""
    messages = [num_tokens * shape.row_bytes, *([num_tokens * shape.riding_bytes] if backward else [])]
    payload = sum(2 * message * (shape.num_ranks - 1) // shape.num_ranks for message in messages)
    metadata = 0 if backward else INTEGER_BYTES * (1 + shape.num_facts) * (shape.num_ranks - 1)
    zeros = np.zeros(shape.num_ranks, dtype=np.int64)
    return Traffic(zeros + payload, zeros + metadata, zeros)
