"""Tables of machines, and what a group of ranks reaches on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ds_hybrid.errors import ConfigError, TopologyError
from ds_hybrid.plan.machine import read_machine
from ds_hybrid.plan.tables import read_table, table_names
from ds_hybrid.topology.hostfile import parse_hostfile

A100 = read_machine("a100x8_ib200")


@pytest.mark.parametrize("name", table_names("machines"))
def test_every_table_is_whole_and_says_where_its_numbers_come_from(name: str) -> None:
    machine = read_machine(name)
    assert machine.cluster(2 * machine.ranks_per_host).num_ranks == 2 * machine.ranks_per_host
    table, _ = read_table("machines", name)
    assert all(number["source"] for number in table.values() if isinstance(number, dict))


def test_what_is_reached_is_the_peak_times_the_efficiency() -> None:
    assert A100.matmul_flops == pytest.approx(312e12 * 0.55)
    assert A100.inside.bandwidth == pytest.approx(300e9 * 0.8)
    assert A100.memory_bytes == pytest.approx(80e9 * 0.92)


def test_hosts_hold_what_they_can_and_the_last_one_the_rest() -> None:
    cluster = A100.cluster(20)
    assert [len(host.ranks) for host in cluster.hosts] == [8, 8, 4]
    assert cluster.link(0, 7) == "NV12"
    assert cluster.link(7, 8) == "NET"


def test_an_exchange_is_held_up_by_the_slower_of_two_links() -> None:
    """16 ranks on two hosts: 8 of 15 parts leave the host, 7 stay."""
    cluster = A100.cluster(16)
    speed = A100.all_to_all(range(16), cluster)
    assert speed.bandwidth == pytest.approx(min(20e9 / (8 / 15), 240e9 / (7 / 15)))
    assert speed.latency == A100.across.latency
    assert A100.all_to_all(range(8), cluster) == A100.inside
    assert A100.all_to_all((0, 8), cluster).bandwidth == pytest.approx(20e9)
    assert A100.all_to_all((3,), cluster) == A100.inside


def test_rings_leave_a_host_over_the_links_of_all_its_ranks() -> None:
    cluster = A100.cluster(16)
    assert A100.ring(range(16), cluster).bandwidth == pytest.approx(8 * 20e9)
    assert A100.ring((0, 8), cluster).bandwidth == pytest.approx(20e9)
    assert A100.ring(range(4), cluster) == A100.inside


def test_hosts_of_a_hostfile() -> None:
    hostfile = parse_hostfile("one slots=8\ntwo slots=4\n", name="hosts")
    assert [(host.name, len(host.ranks)) for host in A100.cluster_of(hostfile).hosts] == [("one", 8), ("two", 4)]
    with pytest.raises(TopologyError, match="one slots=9: a100x8_ib200 has 8 ranks a host"):
        A100.cluster_of(parse_hostfile("one slots=9\n", name="hosts"))


def test_all_problems_of_a_table_come_at_once(tmp_path: Path) -> None:
    table, _ = read_table("machines", "a100x8_ib200")
    broken = {key: value for key, value in table.items() if key != "memory_bytes"}
    broken |= {"matmul_efficiency": {"value": 1.5, "source": "no"}, "link_kind": "NVSwitch", "ranks": 8}
    broken["inside_latency_seconds"] = {"value": 1e-5}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(broken))
    with pytest.raises(ConfigError) as raised:
        read_machine(str(file))
    problems = "\n".join(raised.value.problems)
    for part in ("memory_bytes (", "matmul_efficiency.value = 1.5", "link_kind = ", "ranks (", "seconds.source ("):
        assert part in problems, part


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ({"value": True, "source": "me"}, "matmul_flops.value = true"),
        ({"value": float("inf"), "source": "me"}, "matmul_flops.value = "),
        ({"value": float("nan"), "source": "me"}, "matmul_flops.value = "),
        ({"value": "fast", "source": "me"}, 'matmul_flops.value = "fast"'),
        ({"value": 0, "source": "me"}, "matmul_flops.value = 0"),
        ({"value": 3e14, "source": ""}, 'matmul_flops.source = ""'),
    ],
)
def test_what_is_no_number_with_a_source(number: dict[str, object], message: str, tmp_path: Path) -> None:
    table, _ = read_table("machines", "a100x8_ib200")
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(table | {"matmul_flops": number}))
    with pytest.raises(ConfigError) as raised:
        read_machine(str(file))
    assert len(raised.value.problems) == 1
    assert raised.value.problems[0].startswith(message)


def test_every_way_to_write_a_number(tmp_path: Path) -> None:
    table, _ = read_table("machines", "a100x8_ib200")
    file = tmp_path / "mine.yaml"
    for value in (2 * 10**14, "2e14"):  # YAML takes the second, without a point, for text
        file.write_text(yaml.safe_dump(table | {"matmul_flops": {"value": value, "source": "me"}}))
        assert read_machine(str(file)).matmul_flops == pytest.approx(2e14 * 0.55)
