"""An expert-parallel group that spans nodes: places in them, and the way of a row in two hops. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds_hybrid.errors import DispatchError


def places_in_nodes(node_of_rank: Sequence[int]) -> tuple[int, ...]:
    """The place of each rank among the ranks of its node, in rank order.

    Raises:
        DispatchError: the nodes hold different numbers of ranks.
    """
    nodes = tuple(node_of_rank)
    sizes = [nodes.count(node) for node in sorted(set(nodes))]
    if len(set(sizes)) > 1:
        raise DispatchError(
            f"the nodes hold {', '.join(map(str, sizes))} ranks of the expert-parallel group, must hold the "
            'same number. Choose another autoep_size, or ds_hybrid.dispatch.mode "two_stage".'
        )
    return tuple(nodes[:rank].count(node) for rank, node in enumerate(nodes))


def hops_over_nodes(node_of_rank: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Two [P, P] tables: the rank to which rank i hands a row that is bound for rank j.

    The first hop leads to the rank with i's place in j's node; the second one, inside i's node, to j itself, and is -1
    for j on another node.
    """
    places = places_in_nodes(node_of_rank)
    at = {spot: rank for rank, spot in enumerate(zip(node_of_rank, places, strict=True))}
    across = np.array([[at[node, place] for node in node_of_rank] for place in places])
    nodes = np.asarray(node_of_rank)
    inside = np.where(nodes[:, None] == nodes, np.arange(len(nodes)), -1)
    return across, inside
