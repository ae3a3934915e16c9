"""Measured rates become a table that the planner reads; real ranks measure."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import yaml

from ds_hybrid.calibrate import rank
from ds_hybrid.calibrate.calibration import _rates, calibrate, table
from ds_hybrid.cli.main import main
from ds_hybrid.doctor.processes import Outcome
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


def done(rates: dict[str, float]) -> Outcome:
    return Outcome(0, "a word of a library\n" + json.dumps({"rates": rates}) + "\n", "")


def test_the_rates_are_what_rank_0_tells() -> None:
    assert _rates([done(RATES), Outcome(0, "", "")], 60.0) == RATES


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ([done(RATES), Outcome(None, "", "")], "rank 1 was not done after 60 seconds. Try: ds_hybrid doctor"),
        (
            [done(RATES), Outcome(1, "", "Traceback\nValueError: no.\n")],
            "rank 1 ended with exit code 1: ValueError: no",
        ),
        ([Outcome(-9, "", "")], "rank 0 ended with exit code -9: no word"),
        ([done({**RATES, "bytes_per_second": 1e15})], "1 MiB took no longer than 64 bytes .* Try again when it"),
    ],
)
def test_ranks_that_did_not_measure(outcomes: list[Outcome], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        _rates(outcomes, 60.0)


def test_the_slowest_rank_counts() -> None:
    quick = {**RATES, "matmul_flops": 9e10, "latency_seconds": 1e-4}
    late = {**RATES, "bytes_per_second": 1e8, "latency_seconds": 5e-4}
    assert rank.slowest([quick, late]) == {**RATES, "bytes_per_second": 1e8, "latency_seconds": 5e-4}


def test_rates_are_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 n^3 FLOP of a product of n x n, grouped or not; a copy reads and writes; ranks share the memory."""
    monkeypatch.setenv("LOCAL_SIZE", "4")
    took = iter([0.5, 0.25, 0.125])
    monkeypatch.setattr(rank, "_median_seconds", lambda work: (work(), next(took))[1])
    rates = rank.compute_rates(torch.float32)
    assert rates["matmul_flops"] == 2 * 512**3 / 0.5
    assert rates["expert_flops"] == 2 * 512**3 / 0.25
    assert rates["memory_bytes_per_second"] == 2 * 2**25 / 0.125
    assert rates["memory_bytes"] == pytest.approx(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 4, abs=1)
    assert rates["overlap"] == 0.0


def test_one_rank_has_no_links(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--num-ranks", "1"]) == 2
    assert capsys.readouterr().err == "--num-ranks 1: one rank has no links to measure. Give at least 2.\n"


@pytest.mark.launch
def test_two_real_ranks_measure(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert main(["calibrate", "--num-ranks", "2", "--dtype", "float32", "--write", str(file)]) == 0
    machine = read_machine(str(file))
    assert machine.ranks_per_host == 2
    assert 1e8 < machine.matmul_flops < 1e13  # a core
    assert 1e8 < machine.memory_bytes_per_second < 1e12
    assert 1e6 < machine.inside.bandwidth < 1e11  # gloo, through the host's memory
    assert 1e-6 < machine.inside.latency < 10


@pytest.mark.launch
def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(TopologyError, match=r"rank \d ended with exit code 1: .*no_such_accelerator"):
        calibrate(2, "bf16", {**os.environ, "DS_ACCELERATOR": "no_such_accelerator"})
