"""Across nodes one copy of a token for each node that needs it, then inside the node to the ranks that do.

The slow links carry one row per (token, node) each way; the links inside a node carry the rest. Source of the scheme:
the node-limited dispatch of DeepSeek-V3 (arXiv 2412.19437, section 3.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.hops import Hop, HopsDispatcher
from ds_hybrid.errors import DispatchError


@dataclass(frozen=True)
class NodeProcessGroups:
    """This rank's expert-parallel group, cut by nodes.

    Attributes:
        node_of_rank: the node, 0 to N-1, of each rank of the expert-parallel group.
        across: the ranks that have this rank's place in their nodes.
        inside: the ranks of this rank's node.
    """

    node_of_rank: tuple[int, ...]
    across: Any
    inside: Any


@dataclass(frozen=True)
class NodeGroups:
    """The same with a meter on each: N nodes of L ranks; ``across`` are N ranks, ``inside`` are L."""

    node_of_rank: tuple[int, ...]
    across: RankGroup
    inside: RankGroup


class HierarchicalDispatcher(HopsDispatcher):
    """Two hops: to the peer with this rank's place in each node, then inside the node.

    Raises:
        DispatchError: the nodes hold different numbers of the group's ranks.
    """

    mode = "hierarchical"

    def __init__(self, group: RankGroup, nodes: NodeGroups, **options: Any) -> None:
        place_of_rank = places_in_nodes(nodes.node_of_rank)
        own_node, own_place = nodes.node_of_rank[group.rank], place_of_rank[group.rank]
        at = {spot: rank for rank, spot in enumerate(zip(nodes.node_of_rank, place_of_rank, strict=True))}
        peer = tuple(at[node, own_place] for node in nodes.node_of_rank)
        inside = tuple(rank if node == own_node else -1 for rank, node in enumerate(nodes.node_of_rank))
        super().__init__(group, [Hop(nodes.across, peer), Hop(nodes.inside, inside)], **options)


def places_in_nodes(node_of_rank: tuple[int, ...]) -> tuple[int, ...]:
    """The place of each rank among the ranks of its node, in rank order."""
    sizes = {node: node_of_rank.count(node) for node in sorted(set(node_of_rank))}
    if len(set(sizes.values())) > 1:
        raise DispatchError(
            f"the nodes hold {', '.join(map(str, sizes.values()))} ranks of the expert-parallel group, must hold the "
            'same number. Choose another autoep_size, or ds_hybrid.dispatch.mode "two_stage".'
        )
    return tuple(node_of_rank[:rank].count(node) for rank, node in enumerate(node_of_rank))
