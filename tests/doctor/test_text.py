"""Reports as people read them and as programs do."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ds_hybrid.config import HybridConfig
from ds_hybrid.doctor.collective import Collective
from ds_hybrid.doctor.facts import NoFacts
from ds_hybrid.doctor.findings import Finding
from ds_hybrid.doctor.groups import cluster_of, layout_of
from ds_hybrid.doctor.report import Report, Topology, to_json
from ds_hybrid.doctor.text import spans, to_text
from ds_hybrid.observe.nvlink import GpuUse, NotAvailable
from tests.doctor.stand_ins import made_facts, made_gpu_facts

LINKS = [["X", "NV18", "SYS"], ["NV18", "X", "SYS"], ["SYS", "SYS", "X"]]
USE = {
    0: GpuUse("NVML", 1.04, 90e9, 45.5e9, 450e9),
    1: GpuUse("NVML", 1.04, 0.0, 0.0, None),
    2: NotAvailable("it has no NVLink"),
    3: NotAvailable("it has no NVLink"),
}
HOSTS = {
    "g0": made_gpu_facts("node-0", LINKS, [0, 0, 1], nvlink_use=USE),
    "g1": replace(made_gpu_facts("node-1", LINKS, [0, 0, 1]), ninja=None, devices=("H200", "H200", "H100")),
    "gone": NoFacts(False, "Connection refused"),
}
RANKS = {"g0": 3, "g1": 3, "gone": 2}
CLUSTER = cluster_of(RANKS, {"g0": HOSTS["g0"], "g1": HOSTS["g1"]})  # type: ignore[dict-item]
DOCUMENT = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
LARGE = Report(
    hosts=HOSTS,
    ranks=RANKS,
    topology=Topology(CLUSTER, "NVML", layout_of(CLUSTER, DOCUMENT, HybridConfig(), num_ranks=8)),
    collective=Collective("skipped", "needs 2 devices, and this host has 1"),
    findings=(Finding("error", "reachable", "gone: no."), Finding("warning", "same", "ninja: differs.")),
)
LARGE_TEXT = """\
versions
  python        3.11.7
  torch         2.13.0+cu130
  deepspeed     0.19.8
  ds_hybrid     0.1.0
  transformers  5.24.0
  accelerate    1.15.0
  peft          0.21.2
  ninja         1.13.2            g0
  ninja         none              g1
  compiler      c++ (GCC) 12.2.0

hosts
  host  own name  address    ranks  accelerator  devices
  g0    node-0    192.0.2.7  3      cuda         3 x NVIDIA H200 (140 GiB)
  g1    node-1    192.0.2.7  3      cuda         2 x H200, 1 x H100
  gone  ?         ?          2      ?            ?

topology, links: NVML
  island  host  joined by  ranks  devices  NUMA  EP groups
  0       g0    NVLink     0-1    0-1      0     0
  1       g0    NVLink     2      2        1     1
  2       g1    NVLink     3-4    0-1      0     2
  3       g1    NVLink     5      2        1     1
  4       gone  host       6-7    -        ?     3

groups
  TP    each rank alone
  DP    1 x 8 ranks (at one place of their TP groups), all over 3 hosts with 2 to 3 ranks each
  EP    4 x 2 ranks (the nearest ranks), 2 inside an island of NVLink, 1 over 2 hosts with 1 rank each, 1 inside a host
  EDP   2 x 4 ranks (at one place of their EP groups), all over 3 hosts with 1 to 2 ranks each
  EP 0  ranks 0-1
  EP 1  ranks 2,5
  EP 2  ranks 3-4
  EP 3  ranks 6-7

NVLink use
  g0  GPU 0    90.00 GB/s sent, 45.50 GB/s received over 1.0 s, 20% of its links' speed
  g0  GPU 1    0.00 GB/s sent, 0.00 GB/s received over 1.0 s
  g0  GPU 2-3  not available: it has no NVLink
  g1  -        not available: NVML sees no GPU

collective
  skipped  needs 2 devices, and this host has 1

findings
  error    gone: no.
  warning  ninja: differs."""

SMALL_CLUSTER = cluster_of({"w0": 1}, {"w0": made_facts()})
SMALL = Report(
    hosts={"w0": made_facts(addresses=())},
    ranks={"w0": 1},
    topology=Topology(SMALL_CLUSTER, "none (the accelerator is cpu)", layout=None),
    collective=Collective("ok", "2 ranks on cpu, gloo"),
    findings=(),
)
SMALL_TEXT = """\
versions
  python        3.11.7
  torch         2.13.0+cpu
  deepspeed     0.19.8
  ds_hybrid     0.1.0
  transformers  5.24.0
  accelerate    1.15.0
  peft          0.21.2
  ninja         1.13.2
  compiler      c++ (GCC) 12.2.0

hosts
  host  own name  address  ranks  accelerator  devices
  w0    w0        ?        1      cpu

topology, links: none (the accelerator is cpu)
  island  host  joined by  ranks  devices  NUMA
  0       w0    host       0      -        ?

NVLink use
  w0  -  not available: NVML sees no GPU

collective
  ok  2 ranks on cpu, gloo

findings
  none"""


@pytest.mark.parametrize(("report", "text"), [(LARGE, LARGE_TEXT), (SMALL, SMALL_TEXT)])
def test_text(report: Report, text: str) -> None:
    assert to_text(report) == text


def test_nobody_told_anything() -> None:
    text = to_text(replace(SMALL, hosts={"w0": NoFacts(True, "no")}))
    assert text.startswith("versions\n  unknown\n\nhosts\n")
    assert "\n\nNVLink use\n  unknown\n\n" in text


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([4], "4"), ([0, 1], "0-1"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8")]
)
def test_spans(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


def test_json() -> None:
    report = json.loads(json.dumps(to_json(LARGE)))
    assert list(report) == ["exit_status", "findings", "hosts", "topology", "groups", "collective"]
    assert report["exit_status"] == 2
    assert report["findings"] == [
        {"severity": "error", "check": "reachable", "message": "gone: no."},
        {"severity": "warning", "check": "same", "message": "ninja: differs."},
    ]
    assert [(host["name"], host["num_ranks"], host["facts"] is None) for host in report["hosts"]] == [
        ("g0", 3, False),
        ("g1", 3, False),
        ("gone", 2, True),
    ]
    facts = report["hosts"][1]["facts"]
    assert (facts["host_name"], facts["ninja"], facts["devices"]) == ("node-1", None, ["H200", "H200", "H100"])
    assert facts["nvlink_use"] == {"reason": "NVML sees no GPU"}
    assert report["hosts"][0]["facts"]["nvlink_use"]["0"] == {
        "source": "NVML",
        "seconds": 1.04,
        "sent": 90e9,
        "received": 45.5e9,
        "peak": 450e9,
    }
    assert facts["reports"][2]["links"] == ["SYS", "SYS", "X"]
    assert report["topology"]["source"] == "NVML"
    assert report["topology"]["islands"][3] == {"host": "g1", "ranks": [5], "joined_by": "NVLink"}
    assert report["groups"]["ep"] == [[0, 1], [2, 5], [3, 4], [6, 7]]
    assert list(report["groups"]) == ["tp", "dp", "ep", "edp", "reasons"]
    assert report["collective"] == {"result": "skipped", "detail": "needs 2 devices, and this host has 1"}


def test_json_of_a_report_without_groups_has_the_same_keys() -> None:
    report = to_json(SMALL)
    assert list(report) == list(to_json(LARGE))
    assert (report["exit_status"], report["findings"], report["groups"]) == (0, [], None)
    warned = replace(SMALL, findings=(Finding("warning", "same", "x"),))
    assert to_json(warned)["exit_status"] == 1
