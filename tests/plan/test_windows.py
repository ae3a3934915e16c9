"""Where experts are over a run, against replays of the shipped traces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds_hybrid.config import RebalanceConfig
from ds_hybrid.engine.rebalancer import Rebalancer
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.plan.popularity import Popularity
from ds_hybrid.plan.windows import RebalancePolicy, windows
from ds_hybrid.rebalance.policy import Costs, EventCost
from ds_hybrid.rebalance.simulate import replay
from tests.rebalance.traces import trace


class Training:
    """The rebalancer of the engine, fed with a trace and with what would be measured."""

    def __init__(self, counts: Any, ep_size: int, policy: RebalancePolicy, costs: Costs) -> None:
        num_layers, num_experts = counts.shape[1:]
        placement = ExpertPlacement.contiguous(num_experts, ep_size)
        self.layers = [
            SimpleNamespace(layer_name=str(layer), num_experts=num_experts, placement=placement)
            for layer in range(num_layers)
        ]
        self._counts, self._costs, self._event = counts, costs, EventCost()
        config = RebalanceConfig(
            enabled=True,
            algorithm=policy.algorithm,
            interval=policy.interval,
            load_half_life=policy.half_life,
            horizon=policy.horizon,
            min_gain=policy.min_gain,
        )
        self._rebalancer = Rebalancer(self.layers, config, self, self._move)  # type: ignore[arg-type]
        self._rebalancer._step_loads = self  # type: ignore[assignment]
        self._under_way = self._step = 0

    def placements(self) -> Iterator[list[ExpertPlacement]]:
        """Those of each step."""
        for step in range(1, len(self._counts)):
            yield [layer.placement for layer in self.layers]
            self._step = step
            self._rebalancer.after_step(step, None)
        yield [layer.placement for layer in self.layers]

    def _move(self, targets: Mapping[str, ExpertPlacement]) -> Any:
        for name, target in targets.items():
            self.layers[int(name)].placement = target
        return SimpleNamespace(num_moved=0, bytes_sent=0)

    def after_step(self) -> Any:
        counts, self._under_way = self.settle(), self._step
        return counts

    def settle(self) -> Any:
        step, self._under_way = self._under_way, 0
        return list(self._counts[step - 1]) if step else None

    def begin(self) -> None: ...

    def count(self, num_pairs: Any) -> None: ...

    def node_of_rank(self, layer: Any) -> tuple[int, ...]:
        return ()

    def measure(self, optimizer: Any) -> list[Costs]:
        return [replace(self._costs, seconds_per_event=self._event.seconds)] * len(self.layers)

    def add_event(self, seconds: float) -> None:
        self._event = self._event.after(self._costs.seconds_per_event)

    def refuse_event(self) -> None:
        self._event = self._event.refused()


@pytest.mark.parametrize(
    ("name", "algorithm", "moving", "event"),
    [
        ("e32k2_auxoff300", "swap", 0.3, 0.0),  # layers move apart, and lose sometimes
        ("e32k2_auxoff300", "swap", 0.0, 100.0),  # events are refused
        ("e32k2_auxoff300", "article_round_robin", 0.0, 100.0),  # and not asked
    ],
)
def test_experts_move_as_in_training(name: str, algorithm: Any, moving: float, event: float) -> None:
    """Step by step what the engine's rebalancer decides, of the same loads and costs."""
    counts = trace(name).counts[:800]
    policy = RebalancePolicy(algorithm, interval=20, half_life=20, min_gain=0.0, horizon=50, first=20)
    costs = Costs(8 / counts[0, 0].sum(), moving, 4 * moving, event)
    training = list(Training(counts, 8, policy, costs).placements())
    found = list(windows(Popularity(name, counts, 2), 8, policy, costs))
    for window in found:
        for step in range(window.first, window.last):
            assert tuple(training[step]) == window.placements, step
    moved = sum(window.num_moved for window in found)
    numbers = [[place.rank_of_expert for place in placements] for placements in training]
    assert moved == (np.diff(numbers, axis=0) != 0).sum() > 0
    moves = [window for window in found if window.num_moved]
    assert all(window.seconds >= event for window in moves)
    assert (len(moves) < len(found) / 2) == (event > 0 and algorithm == "swap")


@pytest.mark.parametrize("algorithm", ["swap", "lpt"])
@pytest.mark.parametrize("name", ["synth_switch", "synth_stationary"])
def test_loads_are_those_of_simulate_rebalance(name: str, algorithm: Any) -> None:
    """The same trace, decisions and blocks of 100 steps: the same busiest ranks and moves. No move loses here."""
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
