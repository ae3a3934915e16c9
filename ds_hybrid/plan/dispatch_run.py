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
    """One layer, forward and backward, in each step: two [S] arrays; bytes leave all ranks of a group."""

    seconds: FloatArray
    wire_bytes: FloatArray


def dispatch_run(
    mode: Mode, demands: Demands, num_tokens: float, shape: WireShape, links: Mapping[Way, GroupSpeed]
) -> DispatchRun:
    """Of one dispatcher but ``replicated``, whose cost no routing changes.

    Args:
        num_tokens: T.
        links: as ``predicted_seconds`` takes them.
    """
    num_ranks, num_steps = shape.num_ranks, len(demands.pairs)
    if num_ranks == 1:
        return DispatchRun(np.zeros(num_steps), np.zeros(num_steps))
    group, to_others = links["group"], num_ranks - 1
    riding = 0 if mode == "alltoall" else shape.riding_bytes
    # Dispatch, combine and the gradients of both; routing weights ride on the first and come back with the last.
    row = shape.dispatched_row_bytes + 3 * shape.row_bytes + 2 * riding
    header: float
    if mode == "alltoall":
        header = INTEGER_BYTES * (shape.num_experts // num_ranks + shape.num_facts) * to_others
        most, total = _most(demands.pairs), demands.pairs.sum(1) * to_others
        num_messages = 5
    else:
        header = INTEGER_BYTES * (1 + shape.num_facts) * to_others
        num_messages = 6
        if mode == "hierarchical":
            return _over_nodes(demands, num_tokens, shape, links, header, row)
        header += num_tokens * shape.ids_bytes * to_others
        if mode == "allgather":
            most, total = np.full(num_steps, float(to_others)), np.full(num_steps, float(num_ranks * to_others))
            num_messages = 8
        else:
            most, total = _most(demands.rows), demands.rows.sum(1) * to_others
    return DispatchRun(
        num_messages * group.latency + (header + num_tokens * row * most) / group.bandwidth,
        num_ranks * header + num_tokens * row * total,
    )


def _over_nodes(
    demands: Demands,
    num_tokens: float,
    shape: WireShape,
    links: Mapping[Way, GroupSpeed],
    header: float,
    row: float,
) -> DispatchRun:
    """One row to each node that needs it, then to its ranks. A rank holds rows of N ranks in between."""
    to_node = demands.rows_to_node
    num_nodes = to_node.shape[1]
    size = shape.num_ranks // num_nodes
    group, across, inside = links["group"], links["across"], links["inside"]
    ids = num_tokens * shape.ids_bytes
    held = num_nodes * to_node
    by_node = demands.rows.reshape(len(to_node), num_nodes, size)
    most_inside = num_nodes * _most(by_node).max(1)
    seconds = group.latency + header / group.bandwidth
    seconds += 5 * across.latency + 6 * inside.latency
    seconds += (num_nodes - 1) * ids / across.bandwidth + (size - 1) * INTEGER_BYTES / inside.bandwidth
    ids_inside = ids * (size - 1) * held
    moved = num_tokens * row
    across_rows = size * (num_nodes - 1) * to_node.sum(1)
    inside_rows = (size - 1) * num_nodes * demands.rows.sum(1)
    fixed = shape.num_ranks * (header + (num_nodes - 1) * ids + (size - 1) * INTEGER_BYTES)
    return DispatchRun(
        seconds
        + ids_inside.max(1) / inside.bandwidth
        + moved * (_most(to_node) / across.bandwidth + most_inside / inside.bandwidth),
        fixed + size * ids_inside.sum(1) + moved * (across_rows + inside_rows),
    )


def _most(rows: FloatArray) -> FloatArray:
    """[..., P] -> [...]: the most that a rank receives from the others, or sends to them, per token."""
    num_ranks = rows.shape[-1]
    most: FloatArray = np.maximum((num_ranks - 1) * rows.max(-1), rows.sum(-1) - rows.min(-1))
    return most
