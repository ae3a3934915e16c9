"""Facts of hosts -> the cluster and the groups of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deepspeed.module_inject.auto_ep_folding import build_folding_spec, expected_folding_group_tables

from ds_hybrid.config import HybridConfig
from ds_hybrid.doctor.groups import cluster_of, layout_of, sizes_of
from ds_hybrid.errors import ConfigError, TopologyError
from ds_hybrid.topology.cluster import RankReport
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


@pytest.mark.parametrize(
    ("num_ranks", "tp_size", "ep_size"), [(4, 2, 2), (8, 2, 4), (16, 4, 4), (16, 4, 2), (16, 2, 8), (16, 8, 2)]
)
def test_with_tp_the_groups_are_those_of_deepspeeds_folding(num_ranks: int, tp_size: int, ep_size: int) -> None:
    """Though the links of each host would put other ranks together."""
    hosts = {f"g{number}": 4 for number in range(num_ranks // 4)}
    cluster = cluster_of(hosts, {name: replace(GPU_HOST, reports=reports_of(name)) for name in hosts})
    document = {
        "expert_parallel": {"enabled": True, "autoep_size": ep_size},
        "tensor_parallel": {"autotp_size": tp_size},
    }
    layout = layout_of(cluster, document, AUTO, num_ranks=num_ranks)
    tables = expected_folding_group_tables(
        build_folding_spec(world_size=num_ranks, pp_size=1, tp_size=tp_size, ep_size=ep_size)
    )
    assert layout.tp_groups == tables.tp_groups
    assert layout.dp_groups == tables.dense_dp_groups
    assert layout.ep_groups == tables.ep_groups
    assert layout.edp_groups == tables.edp_groups
    (reason,) = [reason for reason in layout.reasons if reason.startswith("EP: ")]
    groups = f"EP: {num_ranks // ep_size} x {ep_size} ranks (DeepSpeed's folding: consecutive ranks), all "
    assert reason.startswith(groups)


def reports_of(name: str) -> tuple[RankReport, ...]:
    return tuple(replace(report, host_key=name) for report in GPU_HOST.reports)


SEQUENCES: dict[str, Any] = {**PARALLEL, "sequence_parallel_size": 2}
TENSORS: dict[str, Any] = {**PARALLEL, "tensor_parallel": {"autotp_size": 2}}


def test_with_sequence_parallelism_deepspeed_makes_the_groups_too() -> None:
    layout = layout_of(cluster_of({"g0": 4}, {"g0": GPU_HOST}), SEQUENCES, AUTO, num_ranks=4)
    assert layout.ep_groups == ((0, 1), (2, 3))
    assert layout.reasons[2] == "EP: 2 x 2 ranks (DeepSpeed's own: consecutive ranks), all inside a host"


@pytest.mark.parametrize("document", [TENSORS, SEQUENCES])
def test_groups_that_someone_has_chosen_where_deepspeed_makes_them(document: dict[str, Any]) -> None:
    config = HybridConfig.model_validate({"topology": {"expert_groups": [[0, 2], [1, 3]]}})
    with pytest.raises(ConfigError) as error:
        layout_of(cluster_of({"g0": 4}, {"g0": GPU_HOST}), document, config, num_ranks=4)
    assert str(error.value) == (
        "ds_hybrid.topology.expert_groups = [[0, 2], [1, 3]]: not available with tensor or sequence parallelism: "
        'DeepSpeed makes the groups then. Set it to "auto".'
    )


def test_a_size_that_does_not_divide_with_tp() -> None:
    document = {**TENSORS, "expert_parallel": {"enabled": True, "autoep_size": 3}}
    with pytest.raises(TopologyError, match=r"^expert_parallel.autoep_size = 3: must divide the world size 4 = "):
        layout_of(cluster_of({"g0": 4}, {"g0": GPU_HOST}), document, AUTO, num_ranks=4)
