"""Bundles stay near, whole runs stay whole, and hosts get equal shares where the numbers allow."""

from __future__ import annotations

import random

import pytest

from ds_hybrid.topology.cluster import Cluster
from ds_hybrid.topology.packing import Groups, pack
from tests.topology.machines import linked_host, numa_cluster, plain_cluster, real_cluster


def packed(cluster: Cluster, num_items: int, item_size: int = 1) -> Groups:
    items = [tuple(range(first, first + item_size)) for first in range(0, cluster.num_ranks, item_size)]
    bundles = pack(items, num_items, cluster)
    assert all(len(bundle) == num_items for bundle in bundles)
    return tuple(sorted(tuple(sorted(rank for item in bundle for rank in item)) for bundle in bundles))


CROSSED_NUMA = numa_cluster((0, 0, 1, 1, 0, 0, 1, 1))
CROSSED_PCIE = linked_host(
    """
    X    PIX  SYS  SYS  NODE NODE SYS  SYS
    PIX  X    SYS  SYS  NODE NODE SYS  SYS
    SYS  SYS  X    PIX  SYS  SYS  NODE NODE
    SYS  SYS  PIX  X    SYS  SYS  NODE NODE
    NODE NODE SYS  SYS  X    PIX  SYS  SYS
    NODE NODE SYS  SYS  PIX  X    SYS  SYS
    SYS  SYS  NODE NODE SYS  SYS  X    PIX
    SYS  SYS  NODE NODE SYS  SYS  PIX  X
    """,
    (0, 0, 1, 1, 0, 0, 1, 1),
)
CROSSED_NVLINK = linked_host(
    """
    X   NV2 SYS SYS NV1 NV1 SYS SYS
    NV2 X   SYS SYS NV1 NV1 SYS SYS
    SYS SYS X   NV2 SYS SYS NV1 NV1
    SYS SYS NV2 X   SYS SYS NV1 NV1
    NV1 NV1 SYS SYS X   NV2 SYS SYS
    NV1 NV1 SYS SYS NV2 X   SYS SYS
    SYS SYS NV1 NV1 SYS SYS X   NV2
    SYS SYS NV1 NV1 SYS SYS NV2 X
    """
)

CROSSED_PAIRS = linked_host("X SYS NV4 SYS\nSYS X SYS NV4\nNV4 SYS X SYS\nSYS NV4 SYS X", (0, 1, 2, 3))


@pytest.mark.parametrize("cluster", [CROSSED_NUMA, CROSSED_PCIE, CROSSED_NVLINK])
def test_groups_that_no_constant_gives(cluster: Cluster) -> None:
    assert packed(cluster, 4) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert packed(cluster, 2) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert packed(cluster, 2, item_size=2) == ((0, 1, 4, 5), (2, 3, 6, 7))


@pytest.mark.parametrize(
    ("cluster", "num_items", "groups"),
    [
        (real_cluster("v100_8gpu_cube_mesh"), 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (real_cluster("dgx_a100_mlx5_names"), 2, ((0, 1), (2, 3), (4, 5), (6, 7))),
        (real_cluster("a100_pcie_nvlink_bridge_pairs"), 2, ((0, 1), (2, 3))),
        # One GPU has no NVLink: three pairs inside the island, and the fourth inside a NUMA node.
        (real_cluster("b200_one_gpu_lost_nvlink"), 2, ((0, 1), (2, 3), (4, 5), (6, 7))),
        # One group over NVLink, and the rest of the island with that GPU inside the other NUMA node.
        (real_cluster("b200_one_gpu_lost_nvlink"), 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        # Pairs of PCIe bridges, 4 + 2 GPUs on two NUMA nodes: one pair of three must part.
        (real_cluster("pcie_6gpu_ansi"), 3, ((0, 1, 2), (3, 4, 5))),
        # The run of three takes the single one, not a part of a pair.
        (numa_cluster((0, 0, 0, 1, 1, 2, 2, 3)), 4, ((0, 1, 2, 7), (3, 4, 5, 6))),
        # Where none fits the gap, the shortest is cut.
        (numa_cluster((0,) * 4 + (1,) * 4 + (2,) * 2), 5, ((0, 1, 2, 3, 8), (4, 5, 6, 7, 9))),
        # Pairs of NVLink, each over two NUMA nodes.
        (CROSSED_PAIRS, 2, ((0, 2), (1, 3))),
        (numa_cluster((0, 1, 0, None), (0, 0, 1, 1)), 2, ((0, 2), (1, 3), (4, 5), (6, 7))),
    ],
)
def test_inside_a_host(cluster: Cluster, num_items: int, groups: Groups) -> None:
    assert packed(cluster, num_items) == groups


@pytest.mark.parametrize(
    ("ranks_per_host", "num_items", "groups"),
    [
        ((4, 4), 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ((4, 4, 4, 4), 8, (tuple(range(8)), tuple(range(8, 16)))),
        ((6, 6), 4, ((0, 1, 2, 3), (4, 5, 10, 11), (6, 7, 8, 9))),
        ((4, 4, 4), 6, ((0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11))),
        ((2, 2, 2), 3, ((0, 2, 4), (1, 3, 5))),
        ((3, 3, 3, 3), 4, ((0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8, 11))),
        ((3, 1), 4, ((0, 1, 2, 3),)),  # no equal shares in these numbers
        ((12, 4), 8, (tuple(range(8)), tuple(range(8, 16)))),
    ],
)
def test_equal_shares_of_hosts(ranks_per_host: tuple[int, ...], num_items: int, groups: Groups) -> None:
    assert packed(plain_cluster(*ranks_per_host), num_items) == groups


def test_items_that_span_hosts() -> None:
    assert packed(plain_cluster(3, 3, 2), 2, item_size=2) == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("seed", range(40))
def test_what_fits_is_never_left(seed: int) -> None:
    """n ranks in one place give n // size groups inside it: in each island, and in each host."""
    chance = random.Random(seed)
    size = chance.randint(1, 6)
    nodes = [[chance.choice([0, 1, 2]) for _ in range(chance.randint(1, 9))] for _ in range(chance.randint(1, 5))]
    nodes[-1] += [0] * (-sum(map(len, nodes)) % size)
    cluster = numa_cluster(*nodes)
    groups = packed(cluster, size)
    assert sorted(rank for group in groups for rank in group) == list(range(cluster.num_ranks))
    for place_of_rank in (cluster.island_of_rank, cluster.host_of_rank):
        for place in set(place_of_rank):
            inside = sum({place_of_rank[rank] for rank in group} == {place} for group in groups)
            assert inside == place_of_rank.count(place) // size
