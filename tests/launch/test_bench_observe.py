"""launch/bench/observe.py: its arithmetic by hand, and a small run on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from observe import first_engine
from observe_costs import CPU, INSIDE_CPU, INSIDE_WALL, WALL, Calls, Ratio, costs_of, is_resolved, least_interval, ratio

ROOT = Path(__file__).parents[2]
ENGINES = ["off", "again", "events", "timeline", "trace", "all"]


def test_ratios_are_of_intervals_and_records_are_told_apart() -> None:
    measured = np.zeros((4, 2, 3, 4))  # two intervals of two steps, two ranks
    measured[..., WALL] = 1.0
    measured[:, 1, 0, WALL] = 2.0  # `off`: the slower rank takes 2 s a step
    measured[:, 1, 2, WALL] = [3.0, 5.0, 3.0, 5.0]
    measured[..., CPU] = 0.5
    measured[1::2, :, 2, CPU] = 1.0
    measured[:, 0, 2, INSIDE_WALL] = [0.001, 0.25, 0.003, 0.75]
    measured[:, :, 2, INSIDE_CPU] = [[0.0, 0.002], [0.1, 0.2], [0.002, 0.0], [0.3, 0.4]]
    measured[:, 1, 0, INSIDE_WALL] = [1e-6, 3e-6, 1e-6, 3e-6]
    costs = costs_of(measured, 2, 2, Calls(record=70, other=10))
    assert costs.step_ms == 4000
    assert costs.wall.median == pytest.approx((3 + 5) / (2 + 2))
    assert costs.cpu.median == pytest.approx((0.5 + 1.0) / (0.5 + 0.5))
    assert costs.recorded_cpu.median == 2.0
    assert costs.between_cpu is not None
    assert costs.between_cpu.median == 1.0
    assert (costs.record_ms, costs.other_ms) == (500.0, pytest.approx(2.0))
    assert (costs.record_cpu_ms, costs.other_cpu_ms) == (pytest.approx(500), pytest.approx(2))
    assert costs.of_interval == pytest.approx((0.5 + 0.002) / (2 * 2.0))
    off = costs_of(measured, 0, 2, Calls(record=10, other=10))
    assert (off.wall.median, off.cpu.median) == (1.0, 1.0)
    # Measured like the others, and not taken to be nothing.
    assert (off.record_ms, off.other_ms) == (pytest.approx(3e-3), pytest.approx(1e-3))


def test_an_interval_of_one_has_no_other_steps() -> None:
    costs = costs_of(np.ones((6, 1, 2, 4)), 1, 1, Calls(record=7, other=7))
    assert (costs.between_cpu, costs.other_ms, costs.of_interval) == (None, 0, 1.0)


def test_a_median_lies_between_its_bounds_with_95_percent() -> None:
    """Six samples lie on one side of the median once in 32 times; of fewer nothing is said. Tables have 10 of 25."""
    assert ratio(np.array([3.0, 1.0, 2.0, 5.0, 4.0, 6.0])) == Ratio(3.5, (1.0, 6.0))
    assert ratio(np.arange(1.0, 26.0)) == Ratio(13.0, (8.0, 18.0))
    assert ratio(np.arange(1.0, 6.0)) == Ratio(3.0, None)
    rng = np.random.default_rng(0)
    bounds = [ratio(draw).bounds or (0, 0) for draw in rng.normal(size=(2000, 15))]
    inside = [low <= 0 <= high for low, high in bounds]
    assert 0.95 <= np.mean(inside) <= 0.98


def test_an_effect_within_the_noise_is_not_resolved() -> None:
    again = Ratio(1.02, (0.98, 1.05))
    assert is_resolved(Ratio(1.04, (1.01, 1.07)), again)
    assert is_resolved(Ratio(0.9, (0.85, 0.95)), again)
    assert not is_resolved(Ratio(1.04, (0.99, 1.07)), again)
    assert not is_resolved(Ratio(1.015, (1.01, 1.02)), again)
    assert not is_resolved(Ratio(1.5, None), again)


def test_the_least_interval_is_the_first_below_the_goal() -> None:
    for record_ms, other_ms, step_ms in ((20.0, 0.01, 100.0), (5.0, 0.0, 1000.0), (10.0, 0.0, 100.0)):
        found = least_interval(record_ms, other_ms, step_ms)
        assert found is not None
        parts = [(record_ms + (num - 1) * other_ms) / (num * step_ms) for num in (found, max(found - 1, 1))]
        assert parts[0] < 0.01
        assert found == 1 or parts[1] >= 0.01
    assert least_interval(5.0, 1.0, 100.0) is None


@pytest.mark.parametrize("interval", [1, 2, 5, 6, 10])
def test_each_engine_begins_as_many_recorded_steps(interval: int) -> None:
    recorded = [first_engine(step, interval) for step in range(interval - 1, 12 * interval, interval)]
    assert np.bincount(recorded, minlength=len(ENGINES)).tolist() == [2] * len(ENGINES)
    of_all = [first_engine(step, interval) for step in range(6 * interval)]
    assert np.bincount(of_all, minlength=len(ENGINES)).tolist() == [interval] * len(ENGINES)


@pytest.mark.launch
def test_a_small_run_tells_of_all_parts(tmp_path: Path) -> None:
    sizes = {"experts": 4, "layers": 1, "hidden": 16, "width": 8, "batch": 1, "seq-len": 8, "steps": 4, "interval": 2}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(
        [ROOT / "launch/run_local.sh", "2", ROOT / "launch/bench/observe.py", *options, "--json", tmp_path / "o.json"],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TIME_LIMIT": "300"},
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads((tmp_path / "o.json").read_text())
    costs = found["costs"]
    assert list(costs) == ENGINES
    assert found["num_intervals"] == 2
    assert [line.split("`")[1] for line in done.stdout.splitlines() if line.startswith("| `")] == ENGINES
    assert "2 ranks, a record every 2 steps, 2 intervals" in done.stdout
    assert "not resolved" in done.stdout  # two intervals show nothing
    # Function calls hardly depend on the machine.
    calls = {name: each["calls"] for name, each in costs.items()}
    for kind in ("record", "other"):
        assert calls["again"][kind] == pytest.approx(calls["off"][kind], rel=0.01)
    assert all(each["record_ms"] > 0 and each["other_ms"] > 0 for each in costs.values())  # `off` is measured alike
    for name in ENGINES[2:]:
        assert calls[name]["record"] > calls[name]["other"] > calls["off"]["other"]
    assert calls["timeline"]["record"] > calls["events"]["record"]
    assert calls["all"]["record"] > calls["trace"]["record"] > calls["events"]["record"]
    written = {name: {file for file, size in files.items() if size} for name, files in found["file_bytes"].items()}
    assert written["off"] == written["again"] == set()
    assert written["events"] == {"events.jsonl"}
    assert written["timeline"] == {"events.jsonl", "timeline.jsonl"}
    assert written["trace"] == {"events.jsonl", "part-000001.npz"}
    assert written["all"] == {"events.jsonl", "timeline.jsonl", "part-000001.npz"}
