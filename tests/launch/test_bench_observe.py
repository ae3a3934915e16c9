"""launch/bench/observe.py: its arithmetic by hand, and a small run on two ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def load_bench() -> Any:
    """By its path: the package has a room of the same name."""
    spec = importlib.util.spec_from_file_location("bench_observe", ROOT / "launch" / "bench" / "observe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_ratios_are_of_intervals_and_records_are_told_apart() -> None:
    costs_of = load_bench().costs_of
    measured = np.zeros((4, 2, 3, 3))  # two intervals of two steps, two ranks
    measured[..., 0] = 1.0
    measured[:, 1, 0, 0] = 2.0  # `off`: the slower rank takes 2 s a step
    measured[:, 1, 2, 0] = [3.0, 5.0, 3.0, 5.0]
    measured[..., 1] = 0.5
    measured[1::2, :, 2, 1] = 1.0
    measured[:, 0, 2, 2] = [0.001, 0.25, 0.003, 0.75]
    costs = costs_of(measured, 2, 2)
    assert costs.step_ms == 4000
    assert costs.wall_ratio == pytest.approx((3 + 5) / (2 + 2))
    assert costs.cpu_ratio == pytest.approx((0.5 + 1.0) / (0.5 + 0.5))
    assert costs.between_ratio == 1.0
    assert (costs.record_ms, costs.other_ms) == (500.0, pytest.approx(2.0))
    assert costs.record_of_interval == pytest.approx(0.5 / (2 * 2.0))
    off = costs_of(measured, 0, 2)
    assert (off.wall_ratio, off.cpu_ratio, off.record_ms, off.other_ms) == (1.0, 1.0, 0.0, 0.0)


@pytest.mark.launch
def test_a_small_run_tells_of_all_engines_and_files(tmp_path: Path) -> None:
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
    assert list(found["costs"]) == ["off", "again", "observed"]
    assert found["costs"]["observed"]["record_ms"] > found["costs"]["off"]["record_ms"] == 0
    assert {"events.jsonl", "timeline.jsonl", "part-000001.npz"} <= found["file_bytes"].keys()
    assert done.stdout.count("| `") == 3
