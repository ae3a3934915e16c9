"""The groups of the article's plans, what holds for every layout, and sizes that do not fit."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
from deepspeed.module_inject.auto_ep_folding import build_folding_spec, expected_folding_group_tables

from ds_hybrid.errors import TopologyError
from ds_hybrid.topology.cluster import Cluster
from ds_hybrid.topology.layout import ExpertAxis, Hierarchy, Layout, plan_layout
from tests.topology.machines import numa_cluster, plain_cluster, real_cluster

CLUSTERS = {
    "one host": plain_cluster(16),
    "two hosts": plain_cluster(8, 8),
    "uneven hosts": plain_cluster(7, 3, 6),
    "h100": real_cluster("hgx_h100_8gpu", 2),
    "cube mesh": real_cluster("v100_8gpu_cube_mesh", 2),
    "lost nvlink": real_cluster("b200_one_gpu_lost_nvlink", 2),
    "bridges": real_cluster("a100_pcie_nvlink_bridge_pairs", 4),
    "numa": numa_cluster((0, 0, 1, 1, 0, 0, 1, 1), (0, 1, 2, 3, 0, 1, 2, 3)),
}


def plan(cluster: Cluster, tp_size: int, ep_size: int, axis: ExpertAxis = "auto") -> Layout:
    return plan_layout(cluster, world_size=cluster.num_ranks, tp_size=tp_size, ep_size=ep_size, expert_axis=axis)


def test_plan_a_on_16_ranks() -> None:
    layout = plan(CLUSTERS["h100"], 4, 4)
    assert layout.tp_groups == layout.ep_groups == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert layout.dp_groups == layout.edp_groups == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert layout.hierarchies == (None,) * 4
    assert layout.reasons == (
        "TP: 4 x 4 ranks (consecutive ranks, as AutoTP builds them), all inside an island of NVLink",
        "DP: 4 x 4 ranks (at one place of their TP groups), all over 2 hosts with 2 ranks each",
        "EP: 4 x 4 ranks (plan A: the TP groups), all inside an island of NVLink",
        "EDP: 4 x 4 ranks (at one place of their EP groups), all over 2 hosts with 2 ranks each",
    )
    assert layout.warnings == ()


EVEN, ODD = tuple(range(0, 16, 2)), tuple(range(1, 16, 2))
FIRST, SECOND = tuple(range(8)), tuple(range(8, 16))


@pytest.mark.parametrize(
    ("cluster", "axis", "ep_groups", "edp_groups", "why"),
    [
        (
            "one host",
            "auto",
            (EVEN, ODD),
            tuple((rank, rank + 1) for rank in EVEN),
            "(plan B: of one TP index, the nearest data-parallel ranks), all inside a host",
        ),
        (
            "h100",
            "auto",  # whole TP groups stay inside hosts, one TP index does not
            (FIRST, SECOND),
            tuple((rank, rank + 8) for rank in FIRST),
            "(plan B: whole TP groups, the nearest ones), all inside an island of NVLink",
        ),
        (
            "h100",
            "dp",
            (EVEN, ODD),
            tuple((rank, rank + 1) for rank in EVEN),
            "(plan B: of one TP index, the nearest data-parallel ranks), all over 2 hosts with 4 ranks each",
        ),
    ],
)
def test_plan_b_on_16_ranks(
    cluster: str,
    axis: ExpertAxis,
    ep_groups: tuple[tuple[int, ...], ...],
    edp_groups: tuple[tuple[int, ...], ...],
    why: str,
) -> None:
    layout = plan(CLUSTERS[cluster], 2, 8, axis)
    assert layout.dp_groups == (EVEN, ODD)
    assert (layout.ep_groups, layout.edp_groups) == (ep_groups, edp_groups)
    assert layout.reasons[2] == f"EP: 2 x 8 ranks {why}"


@pytest.mark.parametrize(
    "cluster",
    [
        numa_cluster((0,) * 8 + (1,) * 8),  # whole TP groups stay inside islands
        numa_cluster((0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 0, 1, 1, 1, 1)),  # inside hosts, and no way inside islands
    ],
)
def test_links_decide_how_large_groups_lie_over_tp_groups(cluster: Cluster) -> None:
    assert plan(cluster, 2, 8).ep_groups == (FIRST, SECOND)


def test_both_plans_of_the_same_sizes() -> None:
    cluster = plain_cluster(4)
    assert plan(cluster, 2, 2).ep_groups == plan(cluster, 2, 2, "tp").ep_groups == ((0, 1), (2, 3))
    assert plan(cluster, 2, 2, "dp").ep_groups == ((0, 2), (1, 3))
    assert plan(cluster, 2, 2, "dp").edp_groups == ((0, 1), (2, 3))


def test_groups_inside_tp_groups_follow_the_links() -> None:
    layout = plan(numa_cluster((0, 1, 0, 1)), 4, 2)
    assert layout.ep_groups == ((0, 2), (1, 3))
    assert layout.reasons[2] == "EP: 2 x 2 ranks (plan A: inside TP groups), all inside a NUMA node"


def test_interleaved_expert_groups_come_from_the_links() -> None:
    layout = plan(numa_cluster((0, 0, 1, 1, 0, 0, 1, 1)), 1, 4)
    assert layout.ep_groups == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert layout.edp_groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.reasons == (
        "TP: each rank alone",
        "DP: 1 x 8 ranks (at one place of their TP groups), all inside a host",
        "EP: 2 x 4 ranks (the nearest ranks), all inside a NUMA node",
        "EDP: 4 x 2 ranks (at one place of their EP groups), all inside a host",
    )


def test_reasons_name_each_reach() -> None:
    layout = plan(real_cluster("b200_one_gpu_lost_nvlink"), 1, 4)
    assert layout.reasons[2] == (
        "EP: 2 x 4 ranks (the nearest ranks), 1 inside a NUMA node, 1 inside an island of NVLink"
    )


def test_hierarchy_of_an_expert_group_over_hosts() -> None:
    inside, across = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
    layout = plan(plain_cluster(4, 4), 1, 8)
    assert layout.hierarchies == (Hierarchy(inside, across),)
    assert layout.reasons[2] == "EP: 1 x 8 ranks (the nearest ranks), all over 2 hosts with 4 ranks each"
    three_hosts = plan(plain_cluster(4, 4, 4), 1, 6).hierarchies
    assert three_hosts == (
        Hierarchy(((0, 1), (4, 5), (8, 9)), ((0, 4, 8), (1, 5, 9))),
        Hierarchy(((2, 3), (6, 7), (10, 11)), ((2, 6, 10), (3, 7, 11))),
    )


def test_unequal_shares_are_warned_of() -> None:
    layout = plan(plain_cluster(3, 1), 1, 4)
    assert layout.hierarchies == (None,)
    assert layout.reasons[2] == "EP: 1 x 4 ranks (the nearest ranks), all over 2 hosts with 1 to 3 ranks each"
    assert layout.warnings == (
        "expert_parallel.autoep_size = 4: EP groups [[0, 1, 2, 3]] hold unequal numbers of ranks of their hosts, and "
        "hierarchical dispatch cannot serve them.",
    )


@pytest.mark.parametrize(
    ("cluster", "tp_size", "apart", "fitting"),
    [
        (real_cluster("b200_one_gpu_lost_nvlink"), 2, "[[2, 3]]", "1"),
        (real_cluster("v100_8gpu_cube_mesh"), 8, "[[0, 1, 2, 3, 4, 5, 6, 7]]", "1, 2, 4"),
        (plain_cluster(3, 3), 2, "[[2, 3]]", "1, 3"),
    ],
)
def test_tp_groups_that_leave_an_island_are_warned_of(cluster: Cluster, tp_size: int, apart: str, fitting: str) -> None:
    assert plan(cluster, tp_size, tp_size).warnings[0] == (
        f"tensor_parallel.autotp_size = {tp_size}: TP groups are consecutive ranks, and {apart} leave their islands. "
        f"Sizes that stay inside: {fitting}. Or give the ranks their devices in another order."
    )


def test_explicit_groups_win() -> None:
    cluster = plain_cluster(2, 2)
    layout = plan_layout(cluster, world_size=4, ep_size=2, expert_groups=[[3, 0], [1, 2]])
    assert layout.ep_groups == ((0, 3), (1, 2))
    assert layout.edp_groups == ((0, 1), (2, 3))  # by place in the sorted groups
    assert layout.hierarchies == (Hierarchy(((0,), (3,)), ((0, 3),)), Hierarchy(((1,), (2,)), ((1, 2),)))
    assert layout.reasons[2] == (
        "EP: 2 x 2 ranks (as ds_hybrid.topology.expert_groups says), all over 2 hosts with 1 rank each"
    )


SIZES = [
    (tp_size, ep_size, axis)
    for tp_size, ep_size, axis in product((1, 2, 4), (1, 2, 4, 8), get_args(ExpertAxis))
    if axis != "dp" or tp_size * ep_size <= 16
]


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize(("tp_size", "ep_size", "axis"), SIZES)
def test_every_layout(name: str, tp_size: int, ep_size: int, axis: ExpertAxis) -> None:
    cluster = CLUSTERS[name]
    layout = plan(cluster, tp_size, ep_size, axis)
    for groups, size in (
        (layout.tp_groups, tp_size),
        (layout.dp_groups, 16 // tp_size),
        (layout.ep_groups, ep_size),
        (layout.edp_groups, 16 // ep_size),
    ):
        assert sorted(rank for group in groups for rank in group) == list(range(16))
        assert {len(group) for group in groups} == {size}
        assert all(list(group) == sorted(group) for group in groups)
        assert list(groups) == sorted(groups)
    for one, other in ((layout.tp_groups, layout.dp_groups), (layout.ep_groups, layout.edp_groups)):
        assert all(len(set(group) & set(crossing)) == 1 for group in one for crossing in other)
    places = {rank: place for group in layout.ep_groups for place, rank in enumerate(group)}
    assert all(len({places[rank] for rank in group}) == 1 for group in layout.edp_groups)
    if axis == "dp":
        assert all(len({rank % tp_size for rank in group}) == 1 for group in layout.ep_groups)
    if axis == "tp":
        whole = [set(group) for group in layout.tp_groups]
        small, large = (layout.ep_groups, whole) if ep_size <= tp_size else (layout.tp_groups, layout.ep_groups)
        assert all(any(set(group) <= set(other) for other in large) for group in small)
    if tp_size == 1:
        for island in cluster.islands:
            inside = sum(set(group) <= set(island.ranks) for group in layout.ep_groups)
            assert inside == len(island.ranks) // ep_size


@pytest.mark.parametrize("hosts", [(16,), (8, 8), (4, 4, 4, 4)])
@pytest.mark.parametrize(
    ("tp_size", "ep_size"), [(1, 2), (1, 4), (1, 16), (2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8)]
)
def test_plain_hosts_give_deepspeeds_own_groups(hosts: tuple[int, ...], tp_size: int, ep_size: int) -> None:
    tables = expected_folding_group_tables(
        build_folding_spec(world_size=16, pp_size=1, tp_size=tp_size, ep_size=ep_size)
    )
    layout = plan(plain_cluster(*hosts), tp_size, ep_size, "tp")
    assert layout.tp_groups == tables.tp_groups
    assert layout.dp_groups == tables.dense_dp_groups
    assert layout.ep_groups == tables.ep_groups
    assert layout.edp_groups == tables.edp_groups


@pytest.mark.parametrize(
    ("world_size", "tp_size", "ep_size", "axis", "message"),
    [
        (
            16,
            1,
            4,
            "auto",
            "world size 16: the cluster has 12 ranks on 2 hosts. Start as many ranks, or mend the file that "
            "ds_hybrid.topology.source names.",
        ),
        (
            12,
            5,
            1,
            "auto",
            "tensor_parallel.autotp_size = 5: must divide the world size 12 = 2 x 5 + 2. Values that work: 1, 2, 3, 4, "
            "6, 12.",
        ),
        (
            12,
            0,
            1,
            "auto",
            "tensor_parallel.autotp_size = 0: must divide the world size 12. Values that work: 1, 2, 3, 4, 6, 12.",
        ),
        (
            12,
            1,
            8,
            "auto",
            "expert_parallel.autoep_size = 8: must divide the world size 12 = 1 x 8 + 4. Values that work: 1, 2, 3, 4, "
            "6, 12.",
        ),
        (
            12,
            4,
            6,
            "auto",
            "expert_parallel.autoep_size = 6: must divide autotp_size 4 or be a multiple of it or divide the "
            "data-parallel size 3 (world size 12 / autotp_size 4). Values that work: 1, 2, 3, 4, 12.",
        ),
        (
            12,
            4,
            3,
            "tp",
            "expert_parallel.autoep_size = 3: must divide autotp_size 4 or be a multiple of it. Values that work: 1, "
            "2, 4, 12.",
        ),
        (
            12,
            2,
            4,
            "dp",
            "expert_parallel.autoep_size = 4: must divide the data-parallel size 6 (world size 12 / autotp_size 2). "
            "Values that work: 1, 2, 3, 6.",
        ),
    ],
)
def test_sizes_that_do_not_fit(world_size: int, tp_size: int, ep_size: int, axis: ExpertAxis, message: str) -> None:
    with pytest.raises(TopologyError) as error:
        plan_layout(plain_cluster(6, 6), world_size=world_size, tp_size=tp_size, ep_size=ep_size, expert_axis=axis)
    assert str(error.value) == message


def test_explicit_groups_that_are_no_partition() -> None:
    with pytest.raises(TopologyError) as error:
        plan_layout(plain_cluster(4), world_size=4, ep_size=2, expert_groups=[[0, 1], [1]])
    assert str(error.value).splitlines() == [
        "ds_hybrid.topology.expert_groups = [[0, 1], [1]]: groups must have one size, not 1, 2.",
        "ds_hybrid.topology.expert_groups = [[0, 1], [1]]: must hold each rank from 0 to 3 once: missing 2, 3; given "
        "twice 1.",
    ]
