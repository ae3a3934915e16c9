"""Rank lists become process groups. The ranks of all groups make them together, in one order."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups
from torch.distributed import distributed_c10d

from ds_hybrid.dispatch.hierarchical import NodeProcessGroups
from ds_hybrid.dispatch.nodes import places_in_nodes
from ds_hybrid.engine.agreement import raise_alike
from ds_hybrid.errors import ConfigError, HybridError
from ds_hybrid.rebalance.migrate import ExpertGrid
from ds_hybrid.topology.cluster import Cluster
from ds_hybrid.topology.layout import Layout


def expert_groups_of_all_ranks(names: Sequence[str]) -> dict[str, list[list[int]]]:
    """All expert-parallel groups by DeepSpeed's name of their size, such as "ep_size_4". Collective over all ranks."""
    own = {name: dist.get_process_group_ranks(deepspeed_groups._get_expert_parallel_group(name)) for name in names}
    of_rank: list[dict[str, list[int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_rank, own)
    return {name: sorted(map(list, {tuple(theirs[name]) for theirs in of_rank})) for name in names}


def expert_grid(name: str) -> ExpertGrid:
    """The ranks that hold experts of the groups of one size, by DeepSpeed's name of it. Collective over all ranks.

    torch sorts the ranks of a group, so the replicas of a place need not come in the order of its neighbour's.
    """
    group = deepspeed_groups._get_expert_parallel_group(name)
    replicas = deepspeed_groups._get_expert_data_parallel_group(name)
    of_place: list[list[int]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(of_place, dist.get_process_group_ranks(replicas), group=group)
    return ExpertGrid(tuple(zip(*of_place, strict=True)), replicas)


def use_expert_groups(layout: Layout, *, timeout_seconds: int | None = None) -> None:
    """Make the EP and EDP groups of a layout those that DeepSpeed uses for their size. Collective over all ranks.

    DeepSpeed would make groups of consecutive ranks; where it finds groups of a size, it takes those.

    Raises:
        ConfigError: on every rank, when this process has other groups of that size already.
    """
    name = f"ep_size_{len(layout.ep_groups[0])}"
    present = deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS.get(name)
    other = present is not None and tuple(present) not in layout.ep_groups
    raise_alike([_message_of_other_groups(list(present), layout)] if other else [])
    if present is not None:
        return
    for lists, group_of, ranks_of in (
        (
            layout.ep_groups,
            deepspeed_groups._EXPERT_PARALLEL_GROUP,
            deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS,
        ),
        (
            layout.edp_groups,
            deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP,
            deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
        ),
    ):
        for ranks in lists:
            group = dist.new_group(
                list(ranks), timeout=None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
            )
            if dist.get_rank() in ranks:
                group_of[name], ranks_of[name] = group, list(ranks)


def _message_of_other_groups(present: list[int], layout: Layout) -> str:
    return (
        f"ds_hybrid.topology.expert_groups = {[list(ranks) for ranks in layout.ep_groups]}: this process has the "
        f"expert-parallel group {present} from an engine before. Start a new process for other groups."
    )


def make_consecutive_groups(size: int) -> Any:
    """Part all ranks into groups of ``size`` consecutive ones and return this rank's. Collective over all ranks."""
    own = None
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    return own


def make_own_group() -> Any:
    """A group of this rank alone."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def clone_of_world() -> Any:
    """DeepSpeed's group of all ranks for ZeRO. Collective over all ranks the first time."""
    return deepspeed_groups._clone_world_group()


def forget_mpu(kind: type) -> None:
    """Let the next engine start without the mpu of an earlier one, when that is of this kind: DeepSpeed keeps it."""
    if isinstance(deepspeed_groups.mpu, kind):
        deepspeed_groups.mpu = None


def limit_waiting(seconds: int) -> None:
    """Let every collective of this process's groups give up after this time. Groups made later keep torch's limit."""
    for group in list(distributed_c10d._world.pg_map):
        if group.rank() >= 0:
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


class NodeCutter:
    """:func:`make_node_groups` for the layers of a model, once for each expert-parallel group."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._made: dict[Any, NodeProcessGroups | HybridError] = {}

    def __call__(self, expert_parallel_group: Any) -> NodeProcessGroups:
        """The group cut by nodes; raises again what was raised for it before. Collective the first time."""
        if expert_parallel_group not in self._made:
            try:
                self._made[expert_parallel_group] = make_node_groups(expert_parallel_group, self._cluster)
            except HybridError as error:
                self._made[expert_parallel_group] = error
        made = self._made[expert_parallel_group]
        if isinstance(made, HybridError):
            raise made
        return made


def make_node_groups(expert_parallel_group: Any, cluster: Cluster) -> NodeProcessGroups:
    """Cut every expert-parallel group by the hosts of the cluster. Collective over all ranks.

    Raises:
        ConfigError: on every rank, when a group lies on one node.
        DispatchError: on every rank, when the nodes hold different numbers of a group's ranks.
    """
    here = tuple(dist.get_process_group_ranks(expert_parallel_group))
    of_rank: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(of_rank, here)
    nodes_of = {ranks: _nodes(ranks, cluster.host_of_rank) for ranks in sorted(set(of_rank))}
    made = {ranks: _cut(ranks, nodes) for ranks, nodes in nodes_of.items()}
    found = made[here]
    assert found is not None
    return found


def _nodes(ranks: tuple[int, ...], host_of_rank: tuple[int, ...]) -> tuple[int, ...]:
    """The node, 0 to N-1, of each rank of an expert-parallel group."""
    hosts = list(dict.fromkeys(host_of_rank[rank] for rank in ranks))
    nodes = tuple(hosts.index(host_of_rank[rank]) for rank in ranks)
    if len(hosts) in (1, len(ranks)):
        where = "on one node" if len(hosts) == 1 else "with one rank on each node"
        raise ConfigError(
            f'ds_hybrid.dispatch.mode = "hierarchical": the expert-parallel group {list(ranks)} lies {where}. '
            'Set it to "two_stage" or "auto".'
        )
    places_in_nodes(nodes)
    return nodes


def _cut(ranks: tuple[int, ...], nodes: tuple[int, ...]) -> NodeProcessGroups | None:
    """Make the groups of one expert-parallel group; what comes back is of use to its members."""
    groups: dict[str, Any] = {}
    for kind, keys in (("across", places_in_nodes(nodes)), ("inside", nodes)):
        for key in sorted(set(keys)):
            members = [rank for rank, own in zip(ranks, keys, strict=True) if own == key]
            group = dist.new_group(members)
            if dist.get_rank() in members:
                groups[kind] = group
    return NodeProcessGroups(nodes, groups["across"], groups["inside"]) if groups else None
