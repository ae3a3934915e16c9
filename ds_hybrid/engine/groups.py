"""Process groups beyond those that DeepSpeed makes. The ranks of all groups make them together, in one order."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_hybrid.dispatch.hierarchical import NodeProcessGroups
from ds_hybrid.dispatch.nodes import places_in_nodes
from ds_hybrid.errors import ConfigError, HybridError


class NodeCutter:
    """:func:`make_node_groups` for the layers of a model, once for each expert-parallel group."""

    def __init__(self) -> None:
        self._made: dict[Any, NodeProcessGroups | HybridError] = {}

    def __call__(self, expert_parallel_group: Any) -> NodeProcessGroups:
        """The group cut by nodes; raises again what was raised for it before. Collective the first time."""
        if expert_parallel_group not in self._made:
            try:
                self._made[expert_parallel_group] = make_node_groups(expert_parallel_group)
            except HybridError as error:
                self._made[expert_parallel_group] = error
        made = self._made[expert_parallel_group]
        if isinstance(made, HybridError):
            raise made
        return made


def make_node_groups(expert_parallel_group: Any) -> NodeProcessGroups:
    """Cut every expert-parallel group by nodes. Collective over all ranks.

    Raises:
        ConfigError: on every rank, when a group lies on one node.
        DispatchError: on every rank, when the nodes hold different numbers of a group's ranks.
    """
    here = (host_of_this_rank(), dist.get_process_group_ranks(expert_parallel_group))
    reports: list[tuple[str, list[int]]] = [here] * dist.get_world_size()
    dist.all_gather_object(reports, here)
    host_of_rank = [host for host, _ in reports]
    found = None
    for ranks in sorted({tuple(ranks) for _, ranks in reports}):
        cut = _cut(ranks, host_of_rank)
        if dist.get_rank() in ranks:
            found = cut
    assert found is not None
    return found


def host_of_this_rank() -> str:
    """A name that differs between hosts, also between containers of one name."""
    namespace = Path("/proc/self/ns/uts")
    return f"{socket.gethostname()} {os.stat(namespace).st_ino if namespace.exists() else 0}"


def _cut(ranks: tuple[int, ...], host_of_rank: list[str]) -> NodeProcessGroups | None:
    """Make the groups of one expert-parallel group; what comes back is of use to its members."""
    hosts = list(dict.fromkeys(host_of_rank[rank] for rank in ranks))
    if len(hosts) == 1:
        raise ConfigError(
            f'ds_hybrid.dispatch.mode = "hierarchical": the expert-parallel group {list(ranks)} lies on one node. '
            'Set it to "two_stage" or "auto".'
        )
    nodes = tuple(hosts.index(host_of_rank[rank]) for rank in ranks)
    places = places_in_nodes(nodes)
    groups: dict[str, Any] = {}
    for kind, keys in (("across", places), ("inside", nodes)):
        for key in sorted(set(keys)):
            members = [rank for rank, own in zip(ranks, keys, strict=True) if own == key]
            group = dist.new_group(members)
            if dist.get_rank() in members:
                groups[kind] = group
    return NodeProcessGroups(nodes, groups["across"], groups["inside"]) if groups else None
