"""Where experts are over a run, against replays of the shipped traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds_hybrid.plan.popularity import Popularity
from ds_hybrid.plan.windows import RebalancePolicy, windows
from ds_hybrid.rebalance.policy import Costs
from ds_hybrid.rebalance.simulate import replay
from tests.rebalance.traces import trace


@pytest.mark.parametrize("algorithm", ["swap", "lpt", "article_round_robin"])
@pytest.mark.parametrize("name", ["e32k2_aux1e-2", "synth_switch"])
def test_loads_are_those_of_simulate_rebalance(name: str, algorithm: Any) -> None:
    """The same trace, decisions and blocks of 100 steps: the same busiest ranks and moves."""
    counts = trace(name).counts
    settings: dict[str, Any] = {"interval": 50, "half_life": 50, "min_gain": 0.02, "horizon": 200}
    known = replay(trace(name), ep_size=8, algorithm=algorithm, **settings)
    last = known.first_step + known.num_steps
    popularity = Popularity(name, counts[:last], 2)
    policy = RebalancePolicy(algorithm, first=known.first_step, **settings)
    costs = Costs(8 / counts[0, 0].sum(), 0.0, 0.0)
    parts, num_moved = [], 0
    for window in windows(popularity, 8, policy, costs):
        num_moved += window.num_moved
        if window.first >= known.first_step:
            by_layer = [
                counts[window.first : window.last, layer][:, placement.expert_of_slot].sum(-1)
                for layer, placement in enumerate(window.placements)
            ]
            parts.append(np.stack(by_layer, 1))
    blocks = np.concatenate(parts).reshape(-1, 100, 4, 8).sum(1)
    ratios = blocks.max(-1) / blocks.mean(-1)
    assert pytest.approx(known.max_over_mean[1]) == ratios.T
    assert num_moved == known.num_moves


def test_windows_follow_one_another() -> None:
    run = Popularity("even", np.ones((130, 2, 16)), 2)
    for algorithm, edges in (("swap", [0, 20, 70, 120, 130]), ("static", [0, 130])):
        policy = RebalancePolicy(algorithm, interval=50, first=20)  # type: ignore[arg-type]
        found = list(windows(run, 4, policy, Costs(1.0, 0.0, 0.0)))
        assert [window.first for window in found] + [found[-1].last] == edges
        assert [window.last for window in found] == edges[1:]
        assert {window.num_moved for window in found} == {0}
    (only,) = windows(run, 4, RebalancePolicy("swap", first=500), Costs(1.0, 0.0, 0.0))
    assert (only.first, only.last) == (0, 130)
