"""Seconds and bytes of a dispatcher for many demands at once. Pure NumPy.

The same model as ``plan.time.dispatch_cost``, which follows one demand from rank to rank. Here all ranks of a group
hold as many tokens and route them alike, so what a rank sends and receives follows from the chances alone. Symbols: P
ranks on N nodes of equal size, in order; T tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_hybrid.dispatch.modes import Mode
from ds_hybrid.dispatch.predict import GroupSpeed, Way
from ds_hybrid.dispatch.traffic import INTEGER_BYTES, WireShape

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Demands:
    """What each rank gets of a token, for any number of steps.

    Attributes:
        pairs: [S, P]: (token, choice) pairs.
        rows: [S, P]: the chance that the token needs the rank.
        rows_to_node: [S, N]: the chance that it needs the node.
    """

    pairs: FloatArray
    rows: FloatArray
    rows_to_node: FloatArray


@dataclass(frozen=True, eq=False)
class DispatchRun:
    """One layer in each step: [S] arrays. Bytes leave all ranks of a group.

    Attributes:
        seconds, wire_bytes: of forward and backward.
        forward_seconds, forward_bytes: of those, what comes again where a layer is computed again.
    """

    seconds: FloatArray
    wire_bytes: FloatArray
    forward_seconds: FloatArray
    forward_bytes: FloatArray

    def with_forwards(self, num_forwards: int) -> tuple[FloatArray, FloatArray]:
        """Seconds and bytes of so many forwards and one backward."""
        more = num_forwards - 1
        return self.seconds + more * self.forward_seconds, self.wire_bytes + more * self.forward_bytes


def dispatch_run(
    mode: Mode, demands: Demands, num_tokens: float, shape: WireShape, links: Mapping[Way, GroupSpeed]
) -> DispatchRun:
    """Of one dispatcher but ``replicated``, whose cost no routing changes.

    Args:
        num_tokens: T.
        links: as ``predicted_seconds`` takes them.
    """
    num_steps = len(demands.pairs)
    if shape.num_ranks == 1:
        return DispatchRun(*(np.zeros(num_steps) for _ in range(4)))
    # Routing weights ride on the way there, and their gradients on the last way back.
    riding = 0 if mode == "alltoall" else shape.riding_bytes
    there = shape.dispatched_row_bytes + shape.row_bytes + riding
    back = 2 * shape.row_bytes + riding
    exchange = _over_nodes if mode == "hierarchical" else _over_group
    seconds, sent = exchange(mode, demands, num_tokens, shape, links, there, is_forward=True)
    seconds_back, sent_back = exchange(mode, demands, num_tokens, shape, links, back, is_forward=False)
    return DispatchRun(seconds + seconds_back, sent + sent_back, seconds, sent)


def _over_group(
    mode: Mode,
    demands: Demands,
    num_tokens: float,
    shape: WireShape,
    links: Mapping[Way, GroupSpeed],
    row: float,
    *,
    is_forward: bool,
) -> tuple[FloatArray, FloatArray]:
    """[S] seconds and bytes of one pass, in which a row takes ``row`` bytes there and home."""
    group, num_ranks, to_others = links["group"], shape.num_ranks, shape.num_ranks - 1
    header, num_messages = 0.0, 2
    if mode == "allgather":
        num_steps = len(demands.pairs)
        most, total = np.full(num_steps, float(to_others)), np.full(num_steps, float(num_ranks * to_others))
        num_messages += 1  # routing weights go apart
    else:
        rows = demands.pairs if mode == "alltoall" else demands.rows
        most, total = _most(rows), rows.sum(1) * to_others
    if is_forward:
        header, more = _headers(mode, num_tokens, shape)
        num_messages += more
    return (
        num_messages * group.latency + (header + num_tokens * row * most) / group.bandwidth,
        num_ranks * header + num_tokens * row * total,
    )


def _headers(mode: Mode, num_tokens: float, shape: WireShape) -> tuple[float, int]:
    """Bytes that a rank sends to the whole group before the rows, and in how many messages."""
    if mode == "alltoall":
        numbers = shape.num_experts // shape.num_ranks + shape.num_facts
        return float(INTEGER_BYTES * numbers * (shape.num_ranks - 1)), 1
    facts = INTEGER_BYTES * (1 + shape.num_facts)
    if mode == "hierarchical":
        return float(facts * (shape.num_ranks - 1)), 1
    return (facts + num_tokens * shape.ids_bytes) * (shape.num_ranks - 1), 2


def _over_nodes(
    mode: Mode,
    demands: Demands,
    num_tokens: float,
    shape: WireShape,
    links: Mapping[Way, GroupSpeed],
    row: float,
    *,
    is_forward: bool,
) -> tuple[FloatArray, FloatArray]:
    """The same: one row to each node that needs it, then to its ranks. A rank holds rows of N ranks in between."""
    to_node = demands.rows_to_node
    num_nodes = to_node.shape[1]
    size = shape.num_ranks // num_nodes
    group, across, inside = links["group"], links["across"], links["inside"]
    by_node = demands.rows.reshape(len(to_node), num_nodes, size)
    most_inside = num_nodes * _most(by_node).max(1)
    moved = num_tokens * row
    seconds = 2 * (across.latency + inside.latency)
    seconds = seconds + moved * (_most(to_node) / across.bandwidth + most_inside / inside.bandwidth)
    sent = moved * (size * (num_nodes - 1) * to_node.sum(1) + (size - 1) * num_nodes * demands.rows.sum(1))
    if not is_forward:
        return seconds, sent
    header, _ = _headers(mode, num_tokens, shape)
    ids = num_tokens * shape.ids_bytes
    ids_inside = ids * (size - 1) * num_nodes * to_node
    seconds += group.latency + header / group.bandwidth
    seconds += across.latency + (num_nodes - 1) * ids / across.bandwidth
    seconds += 2 * inside.latency + ((size - 1) * INTEGER_BYTES + ids_inside.max(1)) / inside.bandwidth
    sent += shape.num_ranks * (header + (num_nodes - 1) * ids + (size - 1) * INTEGER_BYTES)
    return seconds, sent + size * ids_inside.sum(1)


def _most(rows: FloatArray) -> FloatArray:
    """[..., P] -> [...]: the most that a rank receives from the others, or sends to them, per token."""
    num_ranks = rows.shape[-1]
    most: FloatArray = np.maximum((num_ranks - 1) * rows.max(-1), rows.sum(-1) - rows.min(-1))
    return most
