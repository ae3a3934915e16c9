"""Facts of hosts -> the cluster and the groups of a run."""

from __future__ import annotations

from typing import Any

import pytest

from ds_hybrid.config import HybridConfig
from ds_hybrid.doctor.groups import cluster_of, layout_of, sizes_of
from ds_hybrid.errors import TopologyError
from tests.doctor.stand_ins import made_facts, made_gpu_facts

# Two NUMA nodes with two GPUs each, whose numbers alternate.
ALTERNATING = [
    ["X", "SYS", "PIX", "SYS"],
    ["SYS", "X", "SYS", "PIX"],
    ["PIX", "SYS", "X", "SYS"],
    ["SYS", "PIX", "SYS", "X"],
]
GPU_HOST = made_gpu_facts("own-name", ALTERNATING, [0, 1, 0, 1])
AUTO = HybridConfig()
PARALLEL: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


def test_ranks_get_the_devices_in_order_and_hosts_their_names_in_the_hostfile() -> None:
    cluster = cluster_of({"g0": 4, "w1": 2, "gone": 1}, {"g0": GPU_HOST, "w1": made_facts()})
    assert [(host.name, host.ranks) for host in cluster.hosts] == [
        ("g0", (0, 1, 2, 3)),
        ("w1", (4, 5)),
        ("gone", (6,)),
    ]
    assert cluster.hosts[0].devices == (0, 1, 2, 3)
    assert [list(row) for row in cluster.hosts[0].links] == ALTERNATING
    assert [(island.ranks, island.joined_by) for island in cluster.islands] == [
        ((0, 2), "PIX"),
        ((1, 3), "PIX"),
        ((4, 5), "host"),
        ((6,), "host"),
    ]


def test_fewer_and_more_ranks_than_devices() -> None:
    assert cluster_of({"g0": 2}, {"g0": GPU_HOST}).hosts[0].devices == (0, 1)
    assert cluster_of({"g0": 5}, {"g0": GPU_HOST}).hosts[0].devices == (0, 1, 2, 3, 3)


def test_two_names_of_one_machine_are_one_host() -> None:
    cluster = cluster_of({"a": 1, "b": 1}, {"a": made_facts("w0"), "b": made_facts("w0")})
    assert [(host.name, host.ranks) for host in cluster.hosts] == [("a", (0, 1))]


@pytest.mark.parametrize(
    ("document", "sizes"),
    [
        ({}, (1, 1)),
        (PARALLEL, (1, 2)),
        ({"expert_parallel": {"enabled": False, "autoep_size": 4}}, (1, 1)),
        ({"expert_parallel": {"enabled": True}, "tensor_parallel": {"autotp_size": 4}}, (4, 1)),
        ({**PARALLEL, "tensor_parallel": {"autotp_size": 0}}, (1, 2)),
    ],
)
def test_sizes(document: dict[str, Any], sizes: tuple[int, int]) -> None:
    assert sizes_of(document) == sizes


def test_groups_follow_the_links() -> None:
    cluster = cluster_of({"g0": 4}, {"g0": GPU_HOST})
    assert layout_of(cluster, PARALLEL, AUTO, num_ranks=4).ep_groups == ((0, 2), (1, 3))


def test_groups_that_someone_has_chosen() -> None:
    config = HybridConfig.model_validate({"topology": {"expert_groups": [[0, 1], [2, 3]]}})
    cluster = cluster_of({"g0": 4}, {"g0": GPU_HOST})
    assert layout_of(cluster, PARALLEL, config, num_ranks=4).ep_groups == ((0, 1), (2, 3))


def test_a_described_cluster_of_another_size() -> None:
    with pytest.raises(TopologyError, match=r"^world size 3: the cluster has 4 ranks on 1 hosts\."):
        layout_of(cluster_of({"g0": 4}, {"g0": GPU_HOST}), PARALLEL, AUTO, num_ranks=3)
