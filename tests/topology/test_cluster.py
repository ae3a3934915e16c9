"""Reports of ranks become one cluster: hosts, links, islands, and warnings in words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ds_hybrid.errors import TopologyError
from ds_hybrid.topology.cluster import Cluster, Host, Island, RankReport
from ds_hybrid.topology.links import LinkSpeed
from tests.topology.machines import linked_host, numa_cluster, plain_cluster, real_cluster


def test_two_machines_of_one_name() -> None:
    cluster = real_cluster("a100_pcie_nvlink_bridge_pairs", num_hosts=2)
    assert [host.name for host in cluster.hosts] == ["node", "node#2"]
    assert [host.ranks for host in cluster.hosts] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [host.devices for host in cluster.hosts] == [(0, 1, 2, 3)] * 2
    assert cluster.num_ranks == 8
    assert cluster.host_of_rank == (0, 0, 0, 0, 1, 1, 1, 1)
    assert cluster.numa_node_of_rank == (0, 1, 2, 3, 0, 1, 2, 3)
    assert [cluster.link(0, other) for other in range(8)] == ["X", "NV12", "SYS", "SYS", "NET", "NET", "NET", "NET"]
    assert [cluster.link(7, other) for other in range(8)] == ["NET", "NET", "NET", "NET", "SYS", "SYS", "NV12", "X"]
    assert [island.ranks for island in cluster.islands] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert cluster.island_of_rank == (0, 0, 1, 1, 2, 2, 3, 3)
    assert cluster.warnings == ()


def test_ranks_may_alternate_between_hosts_and_turn_around_on_them() -> None:
    links = {0: ("X", "NV1", "SYS"), 1: ("NV1", "X", "SYS"), 2: ("SYS", "SYS", "X")}
    places = [("b", 2), ("a", 1), ("b", 0), ("a", 0), ("b", 1)]
    cluster = Cluster.from_reports([RankReport(host, host, gpu, gpu // 2, links[gpu]) for host, gpu in places])
    assert [(host.name, host.ranks, host.devices) for host in cluster.hosts] == [
        ("b", (0, 2, 4), (2, 0, 1)),
        ("a", (1, 3), (1, 0)),
    ]
    assert cluster.host_of_rank == (0, 1, 0, 1, 0)
    assert cluster.numa_node_of_rank == (1, 0, 0, 0, 0)
    assert (cluster.link(0, 2), cluster.link(2, 4), cluster.link(1, 3), cluster.link(0, 1)) == (
        "SYS",
        "NV1",
        "NV1",
        "NET",
    )
    assert cluster.islands == (Island((0,), "NVLink"), Island((1, 3), "NVLink"), Island((2, 4), "NVLink"))


def test_nothing_known_but_the_host() -> None:
    cluster = plain_cluster(2, 1)
    assert cluster.hosts[0] == Host("h0", (0, 1), (None, None), (None, None), (("X", "HOST"), ("HOST", "X")))
    assert cluster.islands == (Island((0, 1), "host"), Island((2,), "host"))
    assert numa_cluster((0, 1, 0)).islands == (Island((0, 2), "NUMA"), Island((1,), "NUMA"))


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ((0, ("X", "NV2")), (1, ("NV2", "X")), "NV2"),
        ((0, ("X", "NV2")), (1, None), "NV2"),
        ((0, None), (1, ("NV2", "X")), "NV2"),
        ((0, ("X", "NV2")), (1, ("SYS", "X")), "SYS"),  # they disagree: the slower
        ((0, ("X", "NV1")), (1, ("NV2", "X")), "NV1"),
        ((0, None), (1, None), "HOST"),
        ((None, None), (1, ("NV2", "X")), "HOST"),
        ((0, ("X",)), (1, ("X",)), "HOST"),  # containers that see one GPU each
        ((0, ("X", "NV2")), (0, ("X", "NV2")), "HOST"),  # one GPU
    ],
)
def test_link_of_two_reports(
    one: tuple[int | None, tuple[str, ...] | None], other: tuple[int | None, tuple[str, ...] | None], kind: str
) -> None:
    cluster = Cluster.from_reports([RankReport("k", "n", gpu, None, links) for gpu, links in (one, other)])
    assert (cluster.link(0, 1), cluster.link(1, 0)) == (kind, kind)


def test_warnings() -> None:
    assert real_cluster("b200_one_gpu_lost_nvlink").warnings == (
        "rank 2 (GPU 2 of host node): no NVLink to any rank, while 7 ranks of the host have some. It stands apart. "
        "Check: nvidia-smi nvlink -s",
    )
    shared = Cluster.from_reports([RankReport("k", "n", gpu) for gpu in (0, 1, 0)])
    assert shared.warnings == (
        "ranks 0, 2: all on GPU 0 of host n. Give each its own, unless they are parts of it (MIG).",
    )
    for sound in ("v100_8gpu_cube_mesh", "pcie_6gpu_ansi", "rtx4090_8gpu_no_nvlink", "single_gpu"):
        assert real_cluster(sound).warnings == ()


def test_a_word_that_is_no_link() -> None:
    with pytest.raises(TopologyError) as error:
        Cluster.from_reports([RankReport("k", "n", 0, None, ("X", "NVL")), RankReport("k", "n", 1)])
    assert str(error.value) == (
        'rank 0 on host n reports a link "NVL", must be a word of nvidia-smi topo -m. Describe the machine in a file '
        "that ds_hybrid.topology.source names."
    )


def test_speeds() -> None:
    cluster = plain_cluster(2)
    assert cluster.speed("NV12") == LinkSpeed(None, None)
    known = cluster.with_speeds({"NET": LinkSpeed(25e9), "NV12": LinkSpeed(3e11, 2e-6)})
    renewed = known.with_speeds({"NET": LinkSpeed(12e9, 1e-5)})
    assert (renewed.speed("NV12"), renewed.speed("NET")) == (LinkSpeed(3e11, 2e-6), LinkSpeed(12e9, 1e-5))
    assert cluster.with_speeds({"NV12": LinkSpeed(3e11, 2e-6), "NET": LinkSpeed(25e9)}) == known
    assert known.hosts == cluster.hosts


def test_equal_clusters_are_one_key() -> None:
    one, same = real_cluster("hgx_h100_8gpu", 2), real_cluster("hgx_h100_8gpu", 2)
    others = {real_cluster("hgx_h100_8gpu"), plain_cluster(8, 8), one.with_speeds({"NET": LinkSpeed(1.0)})}
    assert one == same
    assert hash(one) == hash(same)
    assert len(others | {one, same}) == 4


def test_the_fastest_family_is_each_hosts_own() -> None:
    cluster = Cluster(
        (
            linked_host("X NV1\nNV1 X").hosts[0],
            Host(
                "pcie",
                (2, 3, 4),
                (0, 1, 2),
                (None,) * 3,
                (("X", "PIX", "SYS"), ("PIX", "X", "SYS"), ("SYS", "SYS", "X")),
            ),
        )
    )
    assert cluster.islands == (Island((0, 1), "NVLink"), Island((2, 3), "PIX"), Island((4,), "PIX"))


def test_the_room_needs_neither_torch_nor_deepspeed() -> None:
    code = (
        "import ds_hybrid.topology.layout, ds_hybrid.topology.description, ds_hybrid.topology.hostfile, sys\n"
        "print(sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
