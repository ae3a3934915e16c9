"""Across nodes one copy of a token for each node that needs it, then inside the node to the ranks that do.

The slow links carry one row per (token, node) each way; the links inside a node carry the rest. Source of the scheme:
the node-limited dispatch of DeepSeek-V3 (arXiv 2412.19437, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.hops import Hop, HopsDispatcher
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.nodes import hops_over_nodes


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

    def with_meter(self, meter: Meter) -> NodeGroups:
        """The groups of a layer, which notes what it sends over them on ``meter``."""
        return NodeGroups(self.node_of_rank, RankGroup(self.across, meter), RankGroup(self.inside, meter))


CutByNodes = Callable[[Any], NodeProcessGroups]
"""An expert-parallel process group -> its parts; raises a HybridError on every rank where there are none."""


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
        hops = (table[group.rank].tolist() for table in hops_over_nodes(nodes.node_of_rank))
        groups = (nodes.across, nodes.inside)
        super().__init__(group, [Hop(g, tuple(hop)) for g, hop in zip(groups, hops, strict=True)], **options)
