"""Measured rates become a table that the planner reads; real ranks measure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from ds_hybrid.calibrate.calibration import calibrate, table
from ds_hybrid.cli.main import main
from ds_hybrid.errors import TopologyError
from ds_hybrid.plan.machine import read_machine

RATES = {
    "matmul_flops": 2e10,
    "expert_flops": 1e10,
    "memory_bytes_per_second": 4e9,
    "memory_bytes": 8e9,
    "bytes_per_second": 5e8,
    "latency_seconds": 3e-4,
    "overlap": 0.0,
}


def test_the_table_of_measured_rates_gives_those_rates(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(table(RATES, num_ranks=4, dtype="bf16")))
    machine = read_machine(str(file))
    assert machine.ranks_per_host == 4
    assert (machine.matmul_flops, machine.expert_flops) == (2e10, 1e10)
    assert machine.memory_bytes_per_second == 4e9
    assert (machine.inside.latency, machine.inside.bandwidth) == (3e-4, 5e8)


def test_grouped_products_are_not_taken_as_faster_than_plain_ones() -> None:
    quick = table({**RATES, "expert_flops": 3e10}, num_ranks=4, dtype="bf16")
    assert quick["expert_efficiency"]["value"] == 1.0


@pytest.mark.launch
def test_two_real_ranks_measure(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert main(["calibrate", "--num-ranks", "2", "--dtype", "float32", "--write", str(file)]) == 0
    machine = read_machine(str(file))
    assert 1e8 < machine.matmul_flops < 1e16
    assert 1e8 < machine.memory_bytes_per_second < 1e14
    assert 1e6 < machine.inside.bandwidth < 1e13
    assert 0 < machine.inside.latency < 10


@pytest.mark.launch
def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(TopologyError, match=r"rank 0 ended with exit code 1: .*no_such_accelerator"):
        calibrate(1, "bf16", {**os.environ, "DS_ACCELERATOR": "no_such_accelerator"})
