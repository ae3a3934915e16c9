"""launch/bench/rebalance.py: its arithmetic by hand, and a small run on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effect import Track, balance, events, to_markdown, window

from ds_hybrid.observe.events import GainRecord, LayerDecision, RebalanceRecord
from ds_hybrid.observe.run_directory import RunEvents

ROOT = Path(__file__).parents[2]
NUM_STEPS, INTERVAL, WINDOW, NUM_LAYERS, HIDDEN, WIDTH = 10, 3, 4, 2, 16, 8
STATE_BYTES = 3 * HIDDEN * WIDTH * 4 * (1 + 3)
"""Of one expert in fp32: three matrices, each with its master and two moments."""


def make_track(**changes: Any) -> Track:
    """Two steps, two layers, two places, two ranks."""
    values: dict[str, Any] = {
        "loads": np.array([[[3.0, 1.0], [1.0, 1.0]], [[1.0, 3.0], [0.0, 2.0]]]),
        "expert_seconds": np.array([[[0.2, 0.1], [0.1, 0.1]], [[0.2, 0.1], [0.1, 0.1]]]),
        "wall": np.array([[1.0, 2.0], [4.0, 3.0]]),
        "cpu": np.array([[0.5, 0.5], [1.0, 2.0]]),
        "losses": np.array([2.0, 1.0]),
        "num_moved": np.array([0, 0]),
        "log": ((), ()),
    }
    return Track(**(values | changes))


def test_balance_of_layers_of_their_sum_and_of_the_way_through_them() -> None:
    found = balance(make_track().loads)
    # Over both steps the layers have 4 and 4, 1 and 3, and together 5 and 7. Step by step the busiest have 3, 1, 3, 2.
    assert found.max_over_mean == pytest.approx((1 + 1.5) / 2)
    assert found.spread == pytest.approx((0 + 0.5) / 2)
    assert found.total_max_over_mean == pytest.approx(7 / 6)
    assert found.critical_path == pytest.approx(9 / 6)


def test_spread_counts_a_place_with_too_little_too() -> None:
    assert balance(np.array([[[0.0, 3.0, 3.0]]])).spread == pytest.approx(1.0)
    assert balance(np.array([[[0.0, 3.0, 3.0]]])).max_over_mean == pytest.approx(1.5)


def test_ratios_are_within_a_step_and_totals_over_all() -> None:
    slower = make_track(
        wall=np.array([[3.0, 1.0], [4.0, 8.0]]),
        cpu=np.array([[1.0, 1.0], [2.0, 1.0]]),
        losses=np.array([2.0, 1.25]),
        num_moved=np.array([4, 2]),
    )
    parts = window({"off": make_track(), "swap": slower}, 1, 2, ["C++"]).parts
    off, swap = parts["off"], parts["swap"]
    assert (off.wall_ratio, off.cpu_ratio, off.busiest_cpu_ratio, off.total_wall_ratio, off.loss_difference) == (
        *[1.0] * 4,
        0.0,
    )
    assert off.wall_ms == pytest.approx(1e3 * (2 + 4) / 2)
    assert swap.wall_ratio == pytest.approx((3 / 2 + 8 / 4) / 2)
    assert swap.total_wall_ratio == pytest.approx((3 + 8) / (2 + 4))
    assert swap.cpu_ratio == pytest.approx((2 / 1 + 3 / 3) / 2)
    assert swap.busiest_cpu_ratio == pytest.approx((1 / 0.5 + 2 / 2) / 2)
    assert (swap.num_moved, swap.loss_difference) == (6, 0.25)
    assert off.expert_ms == pytest.approx((300, 200))
    only_last = window({"off": make_track(), "swap": slower}, 2, 2, ["C++"]).parts["swap"]
    assert (only_last.wall_ratio, only_last.num_moved) == (2.0, 2)


def test_an_event_is_told_by_its_record_and_its_gain_by_later_ones() -> None:
    decisions = [decision("a", gain=0.0065, pays=True), decision("b", gain=0.0015, pays=True)]
    moved = RebalanceRecord(
        time=0.0,
        step=1,
        action="moved",
        decisions=(*decisions, decision("c", gain=0.1, pays=False)),
        reason="",
        num_moved=6,
        seconds=0.125,
        predicted_seconds=0.004,
        bytes_sent=4096,
        placements={"a": ((0,), (1,)), "b": ((1,), (0,))},
    )
    gains = [
        GainRecord(time=0.0, step=2, layer=layer, moved_at=at, predicted=0.0, measured=measured)
        for layer, at, measured in (("a", 1, 0.004), ("b", 1, -0.001), ("a", 0, 5.0))
    ]
    stays = RebalanceRecord(
        time=0.0, step=2, action="stays", decisions=(decision("a", gain=0.007, pays=True),), reason=""
    )
    track = make_track(wall=np.array([[1.0, 5.0], [4.0, 3.0]]))
    (event,) = events("swap", RunEvents((moved, *gains, stays)), track)
    assert (event.engine, event.step, event.num_moved, event.layers) == ("swap", 1, 6, ("a", "b"))
    assert (event.seconds, event.predicted_seconds, event.rank_0_bytes) == (0.125, 0.004, 4096)
    assert event.extra_seconds == pytest.approx(5 - 4)
    assert event.predicted_gain == pytest.approx(0.008)
    assert event.measured_gain == pytest.approx(0.003)
    assert "| `swap` | 1 | 2 | 6 | 0.0 | 0.12 | 1.00 | 0.004 | 8.0 | 3.0 |" in to_markdown([], None, [event])
    (unmeasured,) = events("swap", RunEvents((moved,)), track)
    assert unmeasured.measured_gain is None


def decision(layer: str, *, gain: float, pays: bool) -> LayerDecision:
    """A gain in seconds per step."""
    return LayerDecision(
        layer=layer,
        load_before=1.6,
        load_after=1.1,
        load_bound=1.0,
        hottest_expert=3,
        hottest_load=1.2,
        num_moved=4,
        num_moved_across=0,
        predicted_gain=gain,
        predicted_cost=0.002,
        pays=pays,
        reason="earned back in 1 steps",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the files that one run wrote, in which whatever gains anything is moved."""
    folder = tmp_path_factory.mktemp("rebalance")
    sizes = {"experts": 8, "layers": NUM_LAYERS, "hidden": HIDDEN, "width": WIDTH, "batch": 2, "seq-len": 16}
    steps = {"steps": NUM_STEPS, "interval": INTERVAL, "window": WINDOW, "warm-up": 2, "shift": 4, "half-life": 3}
    rest = {"mode": "alltoall", "horizon": 10**6, "min-gain": 0.0}
    options = [part for name, value in (sizes | steps | rest).items() for part in (f"--{name}", str(value))]
    files = ["--json", folder / "bench.json", "--markdown", folder / "bench.md"]
    subprocess.run(
        [ROOT / "launch/run_local.sh", "2", ROOT / "launch/bench/rebalance.py", *options, *files],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TIME_LIMIT": "300"},
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "bench.json").read_text())


@pytest.mark.launch
def test_losses_are_the_same_to_the_bit_although_experts_moved(results: dict[str, Any]) -> None:
    parts = [one["parts"] for one in results["windows"]]
    assert [(one["first"], one["last"]) for one in results["windows"]] == [(1, 4), (5, 8), (9, 10)]
    assert [one["domains"] for one in results["windows"]] == [["Python"], ["C++"], ["prose"]]
    assert all(part["swap"]["loss"] == part["off"]["loss"] for part in parts)
    assert all(part["swap"]["loss_difference"] == 0 for part in parts)
    assert sum(part["swap"]["num_moved"] for part in parts) > 0
    assert sum(part["off"]["num_moved"] for part in parts) == 0
    assert parts[-1]["swap"]["load"] != parts[-1]["off"]["load"]


@pytest.mark.launch
def test_everything_is_measured_for_both(results: dict[str, Any]) -> None:
    for one in [*results["windows"], results["without_balance_loss"]]:
        for part in one["parts"].values():
            assert np.array(part["layer_expert_ms"]).shape == (NUM_LAYERS, 2)
            assert np.array(part["layer_expert_ms"]).sum(0) == pytest.approx(part["expert_ms"])
            assert min(part["expert_ms"]) > 0
            assert part["wall_ms"] > 0
            assert part["cpu_ms"] > part["busiest_cpu_ms"] > 0
            # Of two places the busiest has at most everything, and as much more than the mean as the other one less.
            for kind in (part["load"], part["expert_time"]):
                assert 1 <= kind["max_over_mean"] <= 2
                assert kind["spread"] == pytest.approx(kind["max_over_mean"] - 1)
            assert part["load"]["max_over_mean"] <= part["load"]["critical_path"] + 1e-9
        assert one["parts"]["off"]["wall_ratio"] == 1
    assert results["without_balance_loss"]["first"] == 2 + INTERVAL + 1
    assert {"python", "torch", "deepspeed", "ds_hybrid", "device", "cores", "backend"} <= results["settings"].keys()


@pytest.mark.launch
def test_events_tell_what_moved_and_what_it_cost(results: dict[str, Any]) -> None:
    found = results["events"]
    assert {event["step"] for event in found} <= {3, 6, 9}
    moved = sum(one["parts"]["swap"]["num_moved"] for one in results["windows"])
    assert sum(event["num_moved"] for event in found) == moved
    for event in found:
        num_sent = event["num_moved"] // 2  # ranks exchange experts, so each of the two sends half
        checks = event["rank_0_bytes"] - num_sent * STATE_BYTES
        assert checks % 16 == 0
        assert 0 < checks <= 16 * num_sent
        assert event["seconds"] > 0
        assert event["predicted_gain"] > 0
    assert found[0]["measured_gain"] is not None


@pytest.mark.launch
def test_tables_have_a_row_for_each_engine_and_event(folder: Path, results: dict[str, Any]) -> None:
    table = (folder / "bench.md").read_text()
    assert table.count("| `off` |") == 4
    assert table.count("| `swap` |") == 4 + len(results["events"])
