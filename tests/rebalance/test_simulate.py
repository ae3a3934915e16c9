"""Replays: the protocol against a plain rewrite of it, and the balance that real traces reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_hybrid.errors import PlacementError
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.algorithms import Algorithm, new_placement
from ds_hybrid.rebalance.simulate import Replay, replay
from ds_hybrid.rebalance.trace import Trace, read_trace
from tests.rebalance.traces import FOLDER, trace

AUX = "e32k2_aux1e-2"
OFF = "e32k2_auxoff300"


def play(name: str, ep_size: int, algorithm: Algorithm = "swap", **changes: Any) -> Replay:
    settings: dict[str, Any] = {"interval": 50, "half_life": 50, "min_gain": 0.02, "horizon": 200, **changes}
    return replay(trace(name), ep_size=ep_size, algorithm=algorithm, **settings)


@pytest.mark.parametrize(
    ("name", "ep_size", "spread", "max_over_mean"),
    [(AUX, 4, 8.8, 1.075), (AUX, 8, 20.7, 1.181), (OFF, 4, 46.7, 1.459), (OFF, 8, 77.2, 1.772)],
)
def test_experts_that_stay(name: str, ep_size: int, spread: float, max_over_mean: float) -> None:
    """Numbers that were computed elsewhere, from the same traces."""
    before = play(name, ep_size, "static")
    assert before.before.spread == pytest.approx(spread, abs=0.05)
    assert before.before.max_over_mean == pytest.approx(max_over_mean, abs=5e-4)
    assert before.after == before.before
    assert before.num_moves == 0


@pytest.mark.parametrize(
    ("name", "ep_size", "spread", "max_over_mean"),
    [(AUX, 4, 5.0, 1.045), (AUX, 8, 9.0, 1.08), (OFF, 4, 4.0, 1.039), (OFF, 8, 22.0, 1.22)],
)
def test_swap_evens_out_trained_models(name: str, ep_size: int, spread: float, max_over_mean: float) -> None:
    """At least as well as the best of the algorithms that were measured on these traces before."""
    found = play(name, ep_size)
    assert found.after.spread <= spread
    assert found.after.max_over_mean <= max_over_mean
    assert np.mean(found.moved_fraction) <= 0.15


@pytest.mark.parametrize(("name", "spread"), [("synth_stationary", 14.0), ("synth_switch", 18.0)])
def test_swap_evens_out_drawn_loads(name: str, spread: float) -> None:
    """Their hottest expert and the seven lightest are 13 % above a rank's mean already."""
    found = play(name, 8)
    assert found.after.spread <= spread
    assert np.mean(found.moved_fraction) <= 0.15


@pytest.mark.parametrize(("name", "ep_size", "before", "after"), [(AUX, 8, 1.202, 1.13), (OFF, 4, 1.461, 1.06)])
def test_blocks_of_25_steps_at_interval_100(name: str, ep_size: int, before: float, after: float) -> None:
    found = play(name, ep_size, interval=100, average_over=25, start=trace(name).counts.shape[0] // 2)
    assert found.before.max_over_mean == pytest.approx(before, abs=0.02)
    assert found.after.max_over_mean <= after


@pytest.mark.parametrize("name", [AUX, OFF, "synth_stationary", "synth_switch"])
@pytest.mark.parametrize("ep_size", [4, 8])
def test_the_articles_rule_is_worse_than_packing(name: str, ep_size: int) -> None:
    article, packed = play(name, ep_size, "article_round_robin"), play(name, ep_size, "lpt")
    assert article.after.max_over_mean > packed.after.max_over_mean
    assert article.after.critical_path > packed.after.critical_path


def test_swap_moves_a_fraction_of_what_starting_from_scratch_moves() -> None:
    assert play(AUX, 8).num_moves < 0.3 * play(AUX, 8, "lpt_swap").num_moves
    assert play(OFF, 8).num_moves < 0.3 * play(OFF, 8, "lpt_swap", min_gain=0.0).num_moves


def test_collapsed_routing_gains_little_and_moves_little() -> None:
    """Two experts have nearly all pairs: their two ranks set the pace."""
    found = play("e32k2_noaux", 8)
    assert found.after.max_over_mean > 3
    assert found.after.max_over_mean <= found.before.max_over_mean
    assert np.mean(found.moved_fraction) <= 0.15


def test_dear_moves_are_few() -> None:
    free, dear, hopeless = (play(AUX, 8, kappa=kappa) for kappa in (0.0, 6.0, 1e6))
    assert hopeless.num_moves == 0
    assert 0 < dear.num_moves < 0.5 * free.num_moves
    assert free.after.critical_path < dear.after.critical_path < hopeless.after.critical_path


def test_moves_across_nodes_are_priced() -> None:
    nodes = [0, 0, 0, 0, 1, 1, 1, 1]
    flat, priced = (play(OFF, 8, node_of_rank=nodes, cross_node_penalty=penalty) for penalty in (1.0, 8.0))
    assert 0 < priced.num_moves_across < 0.6 * flat.num_moves_across
    assert priced.after.max_over_mean < flat.after.max_over_mean + 0.02


def test_the_protocol() -> None:
    """Step by step, on a small trace, with nothing but the definitions."""
    rng = np.random.default_rng(0)
    counts = rng.multinomial(500, rng.dirichlet(np.ones(8) * 3, size=2), size=(67, 2)).astype(np.int64)
    first, interval, block, half_life = 20, 7, 10, 5.0
    loads = np.zeros((2, 67, 2, 4))
    moved: list[int] = []
    for layer in range(2):
        placement = ExpertPlacement.contiguous(8, 4)
        for step in range(67):
            if step in range(first, 60, interval):
                weights = 0.5 ** (np.arange(step)[::-1] / half_life)
                forecast = (weights[:, None] * counts[:step, layer]).sum(0) / weights.sum()
                proposed = new_placement("lpt_swap", forecast, placement)
                moved.append(int((proposed.rank_of_expert != placement.rank_of_expert).sum()))
                placement = proposed
            for expert in range(8):
                loads[0, step, layer, expert // 2] += counts[step, layer, expert]
                loads[1, step, layer, placement.rank_of_expert[expert]] += counts[step, layer, expert]
    spreads, ratios, paths, totals = ([[], []] for _ in range(4))
    for which in (0, 1):
        for begin in range(first, 60, block):
            of_ranks = loads[which, begin : begin + block].sum(0)  # [L, P]
            relative = of_ranks / of_ranks.mean(1, keepdims=True)
            spreads[which] += list(100 * np.abs(relative - 1).max(1))
            ratios[which] += list(relative.max(1))
            paths[which].append(of_ranks.max(1).sum() / of_ranks.mean(1).sum())
            totals[which].append(100 * np.abs(of_ranks.sum(0) / of_ranks.sum(0).mean() - 1).max())
    found = replay(
        Trace(counts),
        ep_size=4,
        algorithm="lpt_swap",
        interval=interval,
        half_life=half_life,
        min_gain=0.0,
        horizon=200,
        start=first,
        average_over=block,
    )
    assert found.num_steps == 40
    assert found.num_rebalances == 6
    assert found.num_moves == sum(moved)
    assert sum(found.moved_fraction) == pytest.approx(sum(moved) / 16)
    for which, balance in enumerate((found.before, found.after)):
        assert balance.spread == pytest.approx(np.mean(spreads[which]))
        assert balance.max_over_mean == pytest.approx(np.mean(ratios[which]))
        assert balance.critical_path == pytest.approx(np.mean(paths[which]))
        assert balance.card_total == pytest.approx(np.mean(totals[which]))
    assert np.mean([layer.spread_after for layer in found.layers]) == pytest.approx(found.after.spread)
    assert np.mean([layer.max_over_mean_before for layer in found.layers]) == pytest.approx(found.before.max_over_mean)
    assert sum(layer.num_moves for layer in found.layers) == found.num_moves
    assert found.max_over_mean.mean((1, 2)) == pytest.approx([found.before.max_over_mean, found.after.max_over_mean])


def test_the_future_is_not_known() -> None:
    """Counts from step 700 on change nothing that was decided until then."""
    counts = trace(AUX).counts
    other = counts.copy()
    other[700:] = other[700:, :, ::-1]
    settings: dict[str, Any] = {"ep_size": 8, "algorithm": "swap", "interval": 50, "half_life": 50, "min_gain": 0.02}
    settings |= {"horizon": 200, "start": 500}
    one, two = replay(Trace(counts), **settings), replay(Trace(other), **settings)
    assert one.moved_fraction[:5] == two.moved_fraction[:5]  # steps 500 to 700
    assert one.moved_fraction[5:] != two.moved_fraction[5:]


def test_reading() -> None:
    found = read_trace(FOLDER / f"{AUX}.npz")
    assert (found.counts.shape, found.counts.dtype) == ((1148, 4, 32), np.int64)
    assert (found.counts.sum(-1) == 4096).all()
    assert found.expert_parameters == 2 * 128 * 128
    assert read_trace(FOLDER / "synth_switch.npz").expert_parameters is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"load": np.ones(3)}, "has no array counts, but load. counts must be [steps, layers, experts]."),
        ({}, "has no array counts, but none. counts must be [steps, layers, experts]."),
        (
            {"counts": np.ones((5, 32), np.int64)},
            "counts is int64 [5, 32], must be integers [steps, layers, experts], none of them 0.",
        ),
        (
            {"counts": np.ones((5, 2, 4))},
            "counts is float64 [5, 2, 4], must be integers [steps, layers, experts], none of them 0.",
        ),
        (
            {"counts": np.ones((0, 2, 4), np.uint16)},
            "counts is uint16 [0, 2, 4], must be integers [steps, layers, experts], none of them 0.",
        ),
        ({"counts": np.full((5, 2, 4), -3)}, "counts (int64 [5, 2, 4]) has -3, must be 0 or more."),
        (
            {"counts": np.eye(5, 2, dtype=np.int64)[:, :, None]},
            "counts (int64 [5, 2, 1]) is 0 for all experts of layer 1 at step 0.",
        ),
    ],
)
def test_wrong_traces(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.npz"
    np.savez(file, **arrays)
    with pytest.raises(PlacementError) as error:
        read_trace(file)
    assert str(error.value) == f"{file}: {message}"


def test_other_files(tmp_path: Path) -> None:
    text, array, objects = tmp_path / "a.npz", tmp_path / "b.npy", tmp_path / "c.npz"
    text.write_text("step,load\n")
    np.save(array, np.ones((5, 2, 4), np.int64))
    np.savez(objects, counts=np.array([{}], dtype=object))
    for file in (text, array, objects):
        with pytest.raises(PlacementError, match=r"not a \.npz file of plain arrays\. Write it with numpy\.savez\."):
            read_trace(file)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "missing.npz")


def test_what_cannot_be_replayed() -> None:
    with pytest.raises(PlacementError, match="32 experts cannot be spread evenly over 5 ranks"):
        play(AUX, 5)
    with pytest.raises(PlacementError, match="the trace has 200 steps: start 100 must be at least 0 and leave 101"):
        play("e32k2_noaux", 8, average_over=101)
    with pytest.raises(PlacementError, match="start -1 must be"):
        play(AUX, 8, start=-1)
