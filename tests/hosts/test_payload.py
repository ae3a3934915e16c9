"""Bytes between two hosts with two ranks each, as their network interfaces count them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hosts.lab import LAUNCH, Lab

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def reports(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("payload")
    script = str(LAUNCH.parent / "tests" / "hosts" / "payload.py")
    hostfile = str(lab.hostfile(folder, slots=2))
    run = lab.run([str(LAUNCH / "run_hostfile.sh")], folder, HOSTFILE=hostfile, SCRIPT=script)
    assert run.code == 0, run.output
    return run.reports()


@pytest.fixture(scope="module")
def sent(reports: list[dict[str, Any]]) -> dict[str, int]:
    """By both hosts together; all ranks of a host tell the same, but for the moment."""
    return {name: reports[0]["sent"][name] + reports[2]["sent"][name] for name in reports[0]["sent"]}


def test_the_ranks_find_their_hosts(reports: list[dict[str, Any]]) -> None:
    assert [report["host"] for report in reports] == ["w0", "w0", "w1", "w1"]
    for report in reports:
        assert report["hosts"] == {"w0": [0, 1], "w1": [2, 3]}


def test_automatic_groups_stay_on_their_hosts(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["groups"] == {
        "automatic": [[0, 1], [2, 3]],
        "strided": [[0, 2], [1, 3]],
        **{mode: [[0, 1, 2, 3]] for mode in ("alltoall", "two_stage", "hierarchical")},
    }


def test_automatic_groups_send_little_between_hosts(reports: list[dict[str, Any]], sent: dict[str, int]) -> None:
    ratio = sent["automatic"] / sent["strided"]
    print(f"bytes between hosts, automatic / strided groups: {sent['automatic']} / {sent['strided']} = {ratio:.5f}")
    assert reports[0]["predicted"]["automatic"] == 0
    assert ratio < 0.1


def test_fewer_bytes_cross_with_each_better_dispatcher(sent: dict[str, int]) -> None:
    print("bytes between hosts, EP = 4:", {mode: sent[mode] for mode in ("hierarchical", "two_stage", "alltoall")})
    assert sent["hierarchical"] < sent["two_stage"] < sent["alltoall"]


@pytest.mark.parametrize("name", ["strided", "alltoall", "two_stage", "hierarchical"])
def test_the_interfaces_count_what_the_formulas_say(
    reports: list[dict[str, Any]], sent: dict[str, int], name: str
) -> None:
    """Ids, headers and TCP/IP come on top of the payload."""
    predicted = reports[0]["predicted"][name]
    print(f"{name}: {sent[name]} of {predicted} = {sent[name] / predicted:.4f}")
    assert 1 <= sent[name] / predicted <= 1.05
