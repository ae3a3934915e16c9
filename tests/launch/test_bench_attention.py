"""A small run of launch/bench/attention.py on two ranks, and the lines that it fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attention import Result as BenchResult
from attention import fits, line_fit, to_markdown
from attention_methods import DESCRIPTIONS

from ds_hybrid.attention.traffic import KVShape, backward_bytes, forward_bytes, ulysses_bytes

ROOT = Path(__file__).parents[2]
LENGTHS = (96, 192, 384)
NUM_ROUNDS = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("bench") / "attention.json"
    options = ["--length", *map(str, LENGTHS), "--rounds", str(NUM_ROUNDS), "--head-dim", "16", "--json", str(file)]
    subprocess.run(
        [ROOT / "launch/run_local.sh", "2", ROOT / "launch/bench/attention.py", *options],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TIME_LIMIT": "300"},
        check=True,
    )
    content = json.loads(file.read_text())
    assert content["settings"]["backend"] == "gloo"
    return content["results"]


@pytest.mark.launch
def test_every_method_is_right_and_timed(results: list[dict[str, Any]]) -> None:
    assert [(r["length"], r["method"]) for r in results] == [(n, name) for n in LENGTHS for name in DESCRIPTIONS]
    for result in results:
        assert result["reason"] is None
        assert len(result["cpu_seconds"]) == len(result["wall_seconds"]) == NUM_ROUNDS
        assert result["error"] <= (0.1 if result["method"] == "blocks_fp8" else 1e-5)


@pytest.mark.launch
def test_bytes_are_those_of_the_formulas(results: list[dict[str, Any]]) -> None:
    for result in results:
        name, half = result["method"], result["length"] // 2
        fp8 = "fp8_e4m3" if name == "blocks_fp8" else "auto"
        shape = KVShape(2, 1, half, num_kv_heads=4, head_dim=16, value_head_dim=16, value_bytes=4, wire_dtype=fp8)
        forward, backward = forward_bytes(shape), backward_bytes("ring", shape)
        if name in ("serial", "whole", "blocks_kept"):
            backward = backward_bytes("whole", shape)
        if name == "full":
            forward = backward = 0
        if name == "ulysses":
            forward = backward = ulysses_bytes(shape, num_heads=4)
        assert (result["forward_bytes"], result["backward_bytes"]) == (2 * forward, 2 * backward), name


@pytest.mark.launch
def test_what_is_kept_grows_with_the_length(results: list[dict[str, Any]]) -> None:
    for name in DESCRIPTIONS:
        saved = [result["saved_bytes"] for result in results if result["method"] == name]
        assert saved == [saved[0], 2 * saved[0], 4 * saved[0]], name


def test_lines_and_powers() -> None:
    assert line_fit([1, 2, 4], [5.0, 7.0, 11.0]) == pytest.approx((3.0, 2.0, 0.5687), rel=1e-3)
    assert line_fit([1, 2, 4], [1.0, 4.0, 16.0])[2] == pytest.approx(2.0)
    ring = [BenchResult(length, "ring", peak_bytes=5_000_000 + length * 1000) for length in (10_000, 20_000, 40_000)]
    assert fits(ring).splitlines()[2] == "| `ring` | 5.0 | 1000 | 0.79 |"


def test_a_method_that_failed_has_its_reason_in_the_table() -> None:
    table = to_markdown([BenchResult(64, "ulysses", "ValueError: heads")])
    assert "| `ulysses` | not timed: ValueError: heads |" in table
