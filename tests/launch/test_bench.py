"""A small run of launch/bench/dispatch.py on two ranks: it compares before it times, and writes down what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_hybrid.dispatch.modes import MODES

pytestmark = pytest.mark.launch

ROOT = Path(__file__).parents[2]
METHODS = ["autoep", "autoep_again", "autoep_loop", "deepspeed_moe", "alltoall", "two_stage", "broken"]
TIMED = METHODS[:-1]
NUM_ROUNDS = 2
PARTS = ("forward", "backward", "total")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the files that one run wrote."""
    folder = tmp_path_factory.mktemp("bench")
    options = ["--shape", "tiny", "--tokens", "32", "--routing", "uniform", "zipf", "--rounds", str(NUM_ROUNDS)]
    files = ["--json", str(folder / "bench.json"), "--markdown", str(folder / "bench.md")]
    subprocess.run(
        [ROOT / "launch/run_local.sh", "2", ROOT / "launch/bench/dispatch.py", *options, *files, "--methods", *METHODS],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TIME_LIMIT": "300"},
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "bench.json").read_text())


@pytest.fixture(scope="module", params=["uniform", "zipf"])
def methods(results: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """By name, in one of the cases."""
    (case,) = [case for case in results["cases"] if case["case"]["routing"] == request.param]
    return {method["name"]: method for method in case["methods"]}


def test_says_where_it_ran(results: dict[str, Any]) -> None:
    settings = results["settings"]
    assert settings["backend"] == "gloo"
    assert {"python", "torch", "deepspeed", "ds_hybrid", "device", "cores", "threads_per_rank"} <= settings.keys()


def test_wrong_method_is_reported_and_not_timed(methods: dict[str, dict[str, Any]]) -> None:
    broken = methods["broken"]
    assert broken["status"] == "wrong"
    assert "differs from the reference" in broken["reason"]
    assert broken["output_error"] == pytest.approx(1e-3, rel=0.1)
    assert broken["cpu_seconds"] is broken["cpu_ratio"] is broken["wire_bytes"] is None


def test_right_methods_are_timed_in_every_round(methods: dict[str, dict[str, Any]]) -> None:
    assert [name for name, method in methods.items() if method["status"] == "timed"] == TIMED
    for name in TIMED:
        method = methods[name]
        assert max(method["output_error"], method["input_grad_error"]) <= 1e-5
        for clock in ("cpu", "wall"):
            assert [len(method[f"{clock}_seconds"][part]) for part in PARTS] == [NUM_ROUNDS] * 3
            assert min(method[f"{clock}_ratio"].values()) > 0
            assert method[f"{clock}_ratio_to_deepspeed_moe"] > 0
    assert methods["autoep"]["cpu_ratio"]["total"] == 1
    assert methods["deepspeed_moe"]["cpu_ratio_to_deepspeed_moe"] == 1


def test_bytes_that_were_seen_are_the_bytes_that_the_layer_counted(methods: dict[str, dict[str, Any]]) -> None:
    for name in set(TIMED) & set(MODES):
        assert methods[name]["meter_bytes"] == methods[name]["wire_bytes"]
    assert methods["autoep"]["wire_bytes"] == methods["autoep_loop"]["wire_bytes"]
    assert all(methods[name]["wire_over_lower_bound"] >= 1 for name in TIMED)


def test_memory_and_receivers_are_measured(methods: dict[str, dict[str, Any]]) -> None:
    for name in TIMED:
        # The tokens themselves are kept for the gate's gradient: 32 x 16 float32.
        assert methods[name]["saved_bytes"] >= 32 * 16 * 4
        assert methods[name]["receiver_max_over_mean"] >= 1
    assert methods["autoep"]["saved_bytes"] == methods["autoep_again"]["saved_bytes"]


def test_table_has_a_line_for_each_method(folder: Path) -> None:
    table = (folder / "bench.md").read_text()
    assert table.count("\n| `") == 2 * len(TIMED)
    assert table.count("`broken`") == 2
