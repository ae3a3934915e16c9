"""How long each way of dispatching would take for a measured demand over measured links. Pure NumPy.

A message takes the link's latency and the time of the rank that sends or receives the most. Messages of one call follow
one another; what may hide under compute is not counted, nor what packing and sorting cost. Source of the model: the
Hockney (alpha-beta) model of point-to-point messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ds_hybrid.dispatch.modes import Mode
from ds_hybrid.dispatch.nodes import hops_over_nodes
from ds_hybrid.dispatch.traffic import INTEGER_BYTES, WireShape

FloatArray = npt.NDArray[np.float64]

Way = Literal["group", "across", "inside"]
"""Over the whole expert-parallel group, or with ``hierarchical`` over one of its two hops."""


@dataclass(frozen=True)
class GroupSpeed:
    """A group of ranks that exchange rows: seconds before the first byte, and bytes per second of a rank."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class DemandTable:
    """The demand of all P ranks of a group in a mean call.

    Attributes:
        pairs, rows: [P, P], from each rank (first axis) to each; see :class:`ds_hybrid.dispatch.demand.Demand`.
        rows_to_node: [P, P] or [P, 0].
        num_tokens: [P].
    """

    pairs: FloatArray
    rows: FloatArray
    rows_to_node: FloatArray
    num_tokens: FloatArray

    @classmethod
    def of(cls, totals: npt.ArrayLike) -> DemandTable:
        """From every rank's :meth:`ds_hybrid.dispatch.demand.DemandTotal.take`, [P, ...]."""
        totals = np.asarray(totals, dtype=np.float64)
        num_ranks, num_calls = len(totals), totals[:, -1:]
        mean = totals[:, :-1] / num_calls
        pairs, rows, rows_to_node, num_tokens = np.split(mean, [num_ranks, 2 * num_ranks, mean.shape[1] - 1], axis=1)
        return cls(pairs, rows, rows_to_node, num_tokens[:, 0])


@dataclass(frozen=True)
class Message:
    """One exchange: the bytes that leave each rank for others and that reach it, [P] each."""

    way: Way
    sent: FloatArray
    received: FloatArray


def predicted_seconds(
    mode: Mode,
    table: DemandTable,
    shape: WireShape,
    links: Mapping[Way, GroupSpeed],
    *,
    node_of_rank: Sequence[int] = (),
) -> float:
    """Seconds of one call, forward and backward.

    Args:
        links: of the ``group``; for ``hierarchical`` of the other two ways.
        node_of_rank: the node of each of the P ranks, for ``hierarchical``.
    """
    return sum(
        links[message.way].latency
        + float(max(message.sent.max(), message.received.max())) / links[message.way].bandwidth
        for message in messages(mode, table, shape, node_of_rank=node_of_rank)
    )


def messages(
    mode: Mode, table: DemandTable, shape: WireShape, *, node_of_rank: Sequence[int] = ()
) -> Iterator[Message]:
    """Every exchange of one call, forward and backward."""
    if mode == "alltoall":
        header = INTEGER_BYTES * (shape.num_experts // shape.num_ranks + shape.num_facts)
        yield _to_all("group", np.full(shape.num_ranks, header), shape.num_ranks)
        yield from _there_and_back("group", table.pairs, shape, riding_bytes=0)
        return
    longest = table.num_tokens.max()
    yield _to_all("group", np.full(shape.num_ranks, INTEGER_BYTES * (1 + shape.num_facts)), shape.num_ranks)
    if mode == "allgather":
        yield _to_all("group", np.full(shape.num_ranks, longest * shape.ids_bytes), shape.num_ranks)
        everything = np.full_like(table.rows, longest)
        weights = _exchange("group", everything * shape.riding_bytes)
        yield from (weights, weights)
        yield from _there_and_back("group", everything, shape, riding_bytes=0)
    elif mode == "two_stage":
        yield _to_all("group", np.full(shape.num_ranks, longest * shape.ids_bytes), shape.num_ranks)
        yield from _there_and_back("group", table.rows, shape, riding_bytes=shape.riding_bytes)
    elif mode == "hierarchical":
        yield from _over_nodes(table, shape, node_of_rank)
    else:
        raise AssertionError(f"{mode} is not chosen by time")


def _over_nodes(table: DemandTable, shape: WireShape, node_of_rank: Sequence[int]) -> Iterator[Message]:
    nodes = np.asarray(node_of_rank)
    first_hop, _ = hops_over_nodes(node_of_rank)
    ranks, num_nodes = np.arange(shape.num_ranks), int(nodes.max()) + 1
    across, inside = np.zeros_like(table.rows), np.zeros_like(table.rows)
    for node in range(num_nodes):
        peer = first_hop[:, int(np.flatnonzero(nodes == node)[0])]
        np.add.at(across, (ranks, peer), table.rows_to_node[:, node])
        for target in np.flatnonzero(nodes == node):
            np.add.at(inside, (peer, target), table.rows[:, target])

    yield _to_all("across", table.num_tokens[first_hop].max(1) * shape.ids_bytes, num_nodes)
    num_inside = shape.num_ranks // num_nodes
    yield _to_all("inside", np.full(shape.num_ranks, INTEGER_BYTES), num_inside)
    held = across.sum(0)
    longest = np.array([held[nodes == node].max() for node in nodes])
    yield _to_all("inside", longest * shape.ids_bytes, num_inside)
    yield from _there_and_back("across", across, shape, riding_bytes=shape.riding_bytes)
    yield from _there_and_back("inside", inside, shape, riding_bytes=shape.riding_bytes)


def _there_and_back(way: Way, rows: FloatArray, shape: WireShape, *, riding_bytes: int) -> Iterator[Message]:
    """Dispatch and combine, then their gradients; ``rows`` [P, P] go from each rank to each."""
    yield _exchange(way, rows * (shape.dispatched_row_bytes + riding_bytes))
    yield _exchange(way, rows.T * shape.row_bytes)
    yield _exchange(way, rows * shape.row_bytes)
    yield _exchange(way, rows.T * (shape.row_bytes + riding_bytes))


def _exchange(way: Way, num_bytes: FloatArray) -> Message:
    """[P, P] bytes from each rank to each; what stays on a rank does not count."""
    leaving = num_bytes - np.diag(np.diag(num_bytes))
    return Message(way, leaving.sum(1), leaving.sum(0))


def _to_all(way: Way, num_bytes: npt.ArrayLike, num_members: int) -> Message:
    """Each rank sends [P] bytes to each other member of its group, all as many."""
    num_bytes = np.asarray(num_bytes, dtype=np.float64) * (num_members - 1)
    return Message(way, num_bytes, num_bytes)
