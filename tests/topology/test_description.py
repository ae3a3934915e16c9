"""Clusters written down: what a user writes, the round trip, and every problem with the path of its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_hybrid.errors import TopologyError
from ds_hybrid.topology import description
from ds_hybrid.topology.cluster import Cluster, Host, RankReport
from ds_hybrid.topology.description import cluster_to_json, parse_cluster, read_cluster
from ds_hybrid.topology.links import LinkSpeed
from tests.topology.machines import linked_host, numa_cluster, plain_cluster, real_cluster

BY_HAND = """
hosts:
  - name: node-a
    num_ranks: 3
    devices: [2, 0, 1]
    numa_nodes: [0, 0, null]
    links:                      # GPU 2 has no NVLink
      - [X, NV2, SYS]
      - [NV2, X, SYS]
      - [SYS, SYS, X]
  - {name: node-b, num_ranks: 2, links: PHB}
  - name: node-c
    num_ranks: 1
link_speeds:
  NV2: {bytes_per_second: 5e10, latency_seconds: 2.0e-6}
  PHB: {bytes_per_second: 12000000000}
  NET: {latency_seconds: null}
"""


def test_what_a_user_writes(tmp_path: Path) -> None:
    path = tmp_path / "machines.yaml"
    path.write_text(BY_HAND, encoding="utf-8")
    cluster = read_cluster(path)
    assert cluster.hosts == (
        Host(
            "node-a",
            (0, 1, 2),
            (2, 0, 1),
            (0, 0, None),
            (("X", "NV2", "SYS"), ("NV2", "X", "SYS"), ("SYS", "SYS", "X")),
        ),
        Host("node-b", (3, 4), (None, None), (None, None), (("X", "PHB"), ("PHB", "X"))),
        Host("node-c", (5,), (None,), (None,), (("X",),)),
    )
    assert dict(cluster.speeds) == {
        "NV2": LinkSpeed(5e10, 2e-6),
        "PHB": LinkSpeed(12e9, None),
        "NET": LinkSpeed(None, None),
    }


def test_the_example_in_the_docstring_is_one() -> None:
    assert description.__doc__ is not None
    cluster = parse_cluster(description.__doc__.partition("\n\n")[2], name="docstring")
    assert (cluster.num_ranks, cluster.link(0, 3), cluster.speed("NV12").bytes_per_second) == (8, "NV12", 3e11)


def test_ranks_by_number() -> None:
    text = "hosts: [{name: a, ranks: [1, 3]}, {name: b, ranks: [0, 2]}]"
    cluster = parse_cluster(text, name="t")
    assert [(host.name, host.ranks) for host in cluster.hosts] == [("b", (0, 2)), ("a", (1, 3))]


@pytest.mark.parametrize(
    "cluster",
    [
        parse_cluster(BY_HAND, name="t"),
        real_cluster("v100_8gpu_cube_mesh", 2),
        real_cluster("dgx_a100_mlx5_names").with_speeds({"NV12": LinkSpeed(3e11, 1e-6), "NET": LinkSpeed(25e9)}),
        real_cluster("single_gpu", 3),
        plain_cluster(4, 4),
        numa_cluster((0, None, 1), (0,)),
        Cluster.from_reports([RankReport(key, "n", numa_node=1) for key in "abab"]),
        linked_host("X NV1 SYS\nNV1 X NV1\nSYS NV1 X"),
    ],
)
def test_round_trip(cluster: Cluster) -> None:
    assert parse_cluster(cluster_to_json(cluster), name="t") == cluster
    json.loads(cluster_to_json(cluster))


KINDS = "Kinds: NV with a number, PIX, PXB, PHB, NODE, SYS, HOST; NET between hosts."


@pytest.mark.parametrize(
    ("document", "problems"),
    [
        ({}, ["hosts (t): must list the hosts, such as [{name: node-a, num_ranks: 8}]."]),
        ({"hosts": []}, ["hosts = [] (t): must list the hosts, such as [{name: node-a, num_ranks: 8}]."]),
        ({"hosts": {"a": 8}}, ['hosts = {"a": 8} (t): must be a list of objects.']),
        (
            {"hosts": [{"name": "a", "num_ranks": 1}], "link_sped": {}},
            ['link_sped (t): unknown key. Did you mean "link_speeds"?'],
        ),
        (
            {"hosts": [{"name": 1, "num_rank": 1}, {"num_ranks": 0, "numa_nodes": [-1], "links": 3}]},
            [
                "hosts[0].name = 1 (t): must be a string.",
                'hosts[0].num_rank (t): unknown key. Did you mean "num_ranks"?',
                "hosts[0] (t): must have num_ranks, or else ranks as every other host.",
                "hosts[1].num_ranks = 0 (t): must be an integer >= 1.",
                "hosts[1].numa_nodes = [-1] (t): must be a list of integers >= 0 or null.",
                "hosts[1].links = 3 (t): must be a string or a list of lists of strings.",
                "hosts[1].name (t): missing. Give each host a name.",
            ],
        ),
        (
            {"hosts": [{"name": "a", "num_ranks": 1}, {"name": "b", "ranks": [1]}]},
            ["hosts[1] (t): must have num_ranks, or else ranks as every other host."],
        ),
        (
            {
                "hosts": [{"name": "a", "num_ranks": 1}],
                "link_speeds": {
                    "NODES": {},
                    "NET": {"bytes_per_second": 0, "latency": 1},
                    "SYS": {"latency_seconds": "x"},
                },
            },
            [
                f'link_speeds.NODES (t): unknown kind of link. {KINDS} Did you mean "NODE"?',
                "link_speeds.NET.bytes_per_second = 0 (t): must be a number > 0 or null.",
                'link_speeds.NET.latency (t): unknown key. Did you mean "latency_seconds"?',
                'link_speeds.SYS.latency_seconds = "x" (t): must be a number > 0 or null.',
            ],
        ),
        (
            {
                "hosts": [
                    {"name": "a", "num_ranks": 2, "numa_nodes": [0], "devices": [0, 1, 2]},
                    {"name": "a", "num_ranks": 2, "links": "NET"},
                    {"name": "c", "num_ranks": 2, "links": [["X", "PIX"]]},
                ]
            },
            [
                "hosts[0].devices = [0, 1, 2] (t): must have an entry for each of the 2 ranks.",
                "hosts[0].numa_nodes = [0] (t): must have an entry for each of the 2 ranks.",
                'hosts[1].name = "a" (t): is the name of hosts[0] too. Give each host its own.',
                f'hosts[1].links = "NET" (t): {KINDS}',
                'hosts[2].links = [["X", "PIX"]] (t): must have 2 rows of 2, as there are 2 ranks.',
            ],
        ),
        (
            {
                "hosts": [
                    {
                        "name": "a",
                        "num_ranks": 3,
                        "links": [["X", "NV2", "pix"], ["NV1", "X", "SYS"], ["pix", "SYS", "SYS"]],
                    }
                ]
            },
            [
                f'hosts[0].links[0][2] = "pix" (t): {KINDS}',
                'hosts[0].links[1][0] = "NV1" (t): must equal [0][1], which is NV2.',
                f'hosts[0].links[2][0] = "pix" (t): {KINDS}',
                'hosts[0].links[2][2] = "SYS" (t): must be X: a rank and itself.',
            ],
        ),
        (
            {"hosts": [{"name": "a", "ranks": [2, 0]}, {"name": "b", "ranks": [0, 5]}, {"name": "c", "ranks": []}]},
            [
                "hosts[0].ranks = [2, 0] (t): must be ascending, and at least one.",
                "hosts[0].ranks = [2, 0] (t): each rank from 0 to 3 must be on one host, once: not so 0.",
                "hosts[1].ranks = [0, 5] (t): each rank from 0 to 3 must be on one host, once: not so 0, 5.",
                "hosts[2].ranks = [] (t): must be ascending, and at least one.",
            ],
        ),
    ],
)
def test_every_problem_with_its_path(document: dict[str, Any], problems: list[str]) -> None:
    with pytest.raises(TopologyError) as error:
        parse_cluster(json.dumps(document), name="t")
    assert str(error.value).splitlines() == problems


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts: [", "t: line 1, column 9: expected the node content, but found '<stream end>'."),
        ("hosts: []\nhosts: []", 't: line 1, column 1: key "hosts" given twice.'),
        ("hosts: [{[a]: 1}]", "t: line 1, column 10: found unhashable key."),
        ("a: *x", "t: line 1, column 4: found undefined alias 'x'."),
        ("hosts: \0", "t: character 7: special characters are not allowed."),
        ("1: 2", "1 (t): unknown key. Remove it."),
        ("", "t: must hold the key hosts, not a NoneType."),
        ("- a", "t: must hold the key hosts, not a list."),
    ],
)
def test_text_that_is_no_description(text: str, message: str) -> None:
    with pytest.raises(TopologyError) as error:
        parse_cluster(text, name="t")
    assert str(error.value) == message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    with pytest.raises(TopologyError) as error:
        read_cluster(path)
    assert str(error.value) == f"{path}: No such file or directory. Check the path."
    path.write_bytes(b"hosts: \xff")
    with pytest.raises(TopologyError) as error:
        read_cluster(path)
    assert str(error.value) == f"{path}: byte 7 is not UTF-8. Save the file as UTF-8."
