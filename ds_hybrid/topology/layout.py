"""World = TP x DP and EP x EDP: the ranks of every group, and why they are these. Pure.

TP groups are consecutive ranks, as DeepSpeed's AutoTP builds them. Expert groups are chosen by the links. There are two
ways to lay them over the TP groups, and without TP they are one:

- ``tp``: inside a TP group (plan A), or whole TP groups. DeepSpeed's own folding has groups of this kind: those of
  consecutive ranks (``auto_ep_folding.expected_folding_group_tables``), which come out where the links do not object.
- ``dp``: over the data-parallel axis (plan B). The ranks of an expert group have one TP index, and TP ranks, which have
  the same tokens, meet in different groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ds_hybrid.config import broken_partition
from ds_hybrid.errors import TopologyError
from ds_hybrid.problems import show
from ds_hybrid.topology.cluster import Cluster
from ds_hybrid.topology.islands import NUMA_NODE, WHOLE_HOST, Ranks
from ds_hybrid.topology.packing import Groups, pack

ExpertAxis = Literal["auto", "tp", "dp"]


@dataclass(frozen=True)
class Hierarchy:
    """An EP group over N hosts with m ranks on each: the groups of its two hops.

    Attributes:
        inside: [N][m], the ranks on each host.
        across: [m][N], the ranks at each place on their hosts.
    """

    inside: Groups
    across: Groups


@dataclass(frozen=True)
class Layout:
    """The ranks of all groups. Each kind of group parts the ranks; ranks in a group and groups in a kind ascend.

    Attributes:
        tp_groups: share one copy of the dense weights.
        dp_groups: the ranks at one place of their TP groups.
        ep_groups: share one copy of the experts. The place of a rank in its group is its EP rank, because
            ``torch.distributed.new_group`` sorts the ranks.
        edp_groups: the ranks at one place of their EP groups; they hold the same experts.
        hierarchies: for each EP group its two hops, or None where it is on one host or has unequal shares of hosts.
        reasons: why, a line for each kind of group.
        warnings: what costs speed and could be otherwise, one line each.
    """

    tp_groups: Groups
    dp_groups: Groups
    ep_groups: Groups
    edp_groups: Groups
    hierarchies: tuple[Hierarchy | None, ...]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


def plan_layout(
    cluster: Cluster,
    *,
    world_size: int,
    tp_size: int = 1,
    ep_size: int = 1,
    expert_groups: Sequence[Sequence[int]] | None = None,
    expert_axis: ExpertAxis = "auto",
) -> Layout:
    """The groups of a run on ``cluster``.

    EP groups stay inside islands where they fit, then inside NUMA nodes, then inside hosts.

    Args:
        world_size: ranks of the run; those of the cluster.
        tp_size: tensor_parallel.autotp_size; 1 is without TP.
        ep_size: expert_parallel.autoep_size.
        expert_groups: EP groups that someone has chosen: a partition of the ranks. Then nothing is left to choose.
        expert_axis: how EP groups lie over TP groups. auto takes ``tp`` up to ``ep_size`` = ``tp_size``; for larger
            groups the way that spans fewer hosts, then the one that leaves fewer islands, then ``dp``.

    Raises:
        TopologyError: a size does not divide, the cluster has other ranks, or ``expert_groups`` is no partition.
    """
    _check_sizes(cluster, world_size, tp_size, ep_size)
    tp_groups = consecutive_groups(world_size, tp_size)
    if expert_groups is not None:
        _check_partition(expert_groups, world_size, ep_size)
        ep_groups, origin = _ascending(expert_groups), "as ds_hybrid.topology.expert_groups says"
    else:
        axis = _choose_axis(cluster, tp_groups, ep_size, expert_axis)
        ep_groups = _lay(cluster, tp_groups, ep_size, axis)
        origin = _origin(tp_size, ep_size, axis)
    dp_groups, edp_groups = _same_places(tp_groups), _same_places(ep_groups)
    hierarchies = tuple(_hierarchy(group, cluster) for group in ep_groups)
    return Layout(
        tp_groups=tp_groups,
        dp_groups=dp_groups,
        ep_groups=ep_groups,
        edp_groups=edp_groups,
        hierarchies=hierarchies,
        reasons=(
            _reason("TP", tp_groups, "consecutive ranks, as AutoTP builds them", cluster),
            _reason("DP", dp_groups, "at one place of their TP groups", cluster),
            _reason("EP", ep_groups, origin, cluster),
            _reason("EDP", edp_groups, "at one place of their EP groups", cluster),
        ),
        warnings=(*_tp_warnings(cluster, tp_groups), *_share_warnings(cluster, ep_groups, hierarchies)),
    )


def consecutive_groups(world_size: int, size: int) -> Groups:
    """The groups that DeepSpeed makes by itself: runs of ``size`` ranks, which divides ``world_size``."""
    return tuple(tuple(range(first, first + size)) for first in range(0, world_size, size))


def _check_sizes(cluster: Cluster, world_size: int, tp_size: int, ep_size: int) -> None:
    if cluster.num_ranks != world_size:
        raise TopologyError(
            f"world size {world_size}: the cluster has {cluster.num_ranks} ranks on {len(cluster.hosts)} hosts. Start "
            "as many ranks, or mend the file that ds_hybrid.topology.source names."
        )
    for key, size in (("tensor_parallel.autotp_size", tp_size), ("expert_parallel.autoep_size", ep_size)):
        if size < 1 or world_size % size:
            total = f" = {world_size // size} x {size} + {world_size % size}" if size > 0 else ""
            raise TopologyError(
                f"{key} = {size}: must divide the world size {world_size}{total}. "
                f"Values that work: {_listed(_divisors(world_size))}."
            )


def _choose_axis(cluster: Cluster, tp_groups: Groups, ep_size: int, axis: ExpertAxis) -> ExpertAxis:
    tp_size, dp_size = len(tp_groups[0]), len(tp_groups)
    works = {size: _axes(size, tp_size, dp_size) for size in _divisors(tp_size * dp_size)}
    possible = [one for one in works[ep_size] if axis in ("auto", one)]
    if not possible:
        rules = {
            "tp": f"divide autotp_size {tp_size} or be a multiple of it",
            "dp": f"divide the data-parallel size {dp_size} (world size {tp_size * dp_size} / autotp_size {tp_size})",
        }
        must = " or ".join(rule for one, rule in rules.items() if axis in ("auto", one))
        sizes = [size for size, axes in works.items() if axis in axes or (axis == "auto" and axes)]
        raise TopologyError(
            f"expert_parallel.autoep_size = {ep_size}: must {must}. Values that work: {_listed(sizes)}."
        )
    if ep_size <= tp_size:
        return possible[0]

    def cost(one: ExpertAxis) -> tuple[int, int, bool]:
        groups = _lay(cluster, tp_groups, ep_size, one)
        hosts = sum(len({cluster.host_of_rank[rank] for rank in group}) for group in groups)
        return hosts, sum(not _in_island(group, cluster) for group in groups), one == "tp"

    return min(possible, key=cost)


def _axes(ep_size: int, tp_size: int, dp_size: int) -> list[ExpertAxis]:
    """The ways to lay EP groups of this size over TP groups."""
    axes: list[ExpertAxis] = []
    if tp_size % ep_size == 0 or ep_size % tp_size == 0:
        axes.append("tp")
    if dp_size % ep_size == 0:
        axes.append("dp")
    return axes


def _lay(cluster: Cluster, tp_groups: Groups, ep_size: int, axis: ExpertAxis) -> Groups:
    tp_size = len(tp_groups[0])
    if axis == "dp":
        bundles = pack(tp_groups, ep_size, cluster)
        return _ascending([group[index] for group in bundle] for bundle in bundles for index in range(tp_size))
    if ep_size >= tp_size:
        bundles = pack(tp_groups, ep_size // tp_size, cluster)
    else:
        bundles = [bundle for group in tp_groups for bundle in pack([(rank,) for rank in group], ep_size, cluster)]
    return _ascending([rank for item in bundle for rank in item] for bundle in bundles)


def _origin(tp_size: int, ep_size: int, axis: ExpertAxis) -> str:
    if tp_size == 1:
        return "the nearest ranks"
    if axis == "dp":
        return "plan B: of one TP index, the nearest data-parallel ranks"
    if ep_size > tp_size:
        return "plan B: whole TP groups, the nearest ones"
    return "plan A: the TP groups" if ep_size == tp_size else "plan A: inside TP groups"


def _check_partition(groups: Sequence[Sequence[int]], world_size: int, ep_size: int) -> None:
    broken = broken_partition(groups, world_size=world_size, group_size=ep_size)
    if broken:
        place = f"ds_hybrid.topology.expert_groups = {show(groups)}"
        raise TopologyError("\n".join(f"{place}: {rule}" for rule in broken))


def _hierarchy(group: Ranks, cluster: Cluster) -> Hierarchy | None:
    on_host: dict[int, list[int]] = {}
    for rank in group:
        on_host.setdefault(cluster.host_of_rank[rank], []).append(rank)
    if len(on_host) == 1 or len({len(ranks) for ranks in on_host.values()}) > 1:
        return None
    inside = _ascending(on_host.values())
    return Hierarchy(inside, _same_places(inside))


def _reason(kind: str, groups: Groups, origin: str, cluster: Cluster) -> str:
    size = len(groups[0])
    if size == 1:
        return f"{kind}: each rank alone"
    reach = Counter(_reach(group, cluster) for group in groups)
    counted = [f"{'all' if len(reach) == 1 else count} {where}" for where, count in reach.items()]
    return f"{kind}: {len(groups)} x {size} ranks ({origin}), {', '.join(counted)}"


def _reach(group: Ranks, cluster: Cluster) -> str:
    """The smallest place that holds a group."""
    if _in_island(group, cluster):
        joined_by = cluster.islands[cluster.island_of_rank[group[0]]].joined_by
        names = {NUMA_NODE: "inside a NUMA node", WHOLE_HOST: "inside a host"}
        return names.get(joined_by, f"inside an island of {joined_by}")
    shares = Counter(cluster.host_of_rank[rank] for rank in group)
    if len(shares) > 1:
        sizes = sorted({min(shares.values()), max(shares.values())})
        each = "1 rank" if sizes == [1] else f"{' to '.join(map(str, sizes))} ranks"
        return f"over {len(shares)} hosts with {each} each"
    nodes = {cluster.numa_node_of_rank[rank] for rank in group}
    return "inside a NUMA node" if len(nodes) == 1 and None not in nodes else "inside a host"


def _in_island(group: Ranks, cluster: Cluster) -> bool:
    islands = cluster.island_of_rank
    first = islands[group[0]]
    return all(islands[rank] == first for rank in group)


def _tp_warnings(cluster: Cluster, tp_groups: Groups) -> Iterator[str]:
    size = len(tp_groups[0])
    apart = [list(group) for group in tp_groups if not _in_island(group, cluster)]
    if apart:
        fitting = [
            divisor
            for divisor in _divisors(cluster.num_ranks)
            if all(_in_island(group, cluster) for group in consecutive_groups(cluster.num_ranks, divisor))
        ]
        yield (
            f"tensor_parallel.autotp_size = {size}: TP groups are consecutive ranks, and {show(apart)} leave their "
            f"islands. Sizes that stay inside: {_listed(fitting)}. Or give the ranks their devices in another order."
        )


def _share_warnings(cluster: Cluster, ep_groups: Groups, hierarchies: Sequence[Hierarchy | None]) -> Iterator[str]:
    uneven = [
        list(group)
        for group, hierarchy in zip(ep_groups, hierarchies, strict=True)
        if hierarchy is None and len({cluster.host_of_rank[rank] for rank in group}) > 1
    ]
    if uneven:
        yield (
            f"expert_parallel.autoep_size = {len(ep_groups[0])}: EP groups {show(uneven)} hold unequal numbers of "
            "ranks of their hosts, and hierarchical dispatch cannot serve them."
        )


def _same_places(groups: Groups) -> Groups:
    return _ascending(zip(*groups, strict=True))


def _ascending(groups: Iterable[Sequence[int]]) -> Groups:
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
