"""When moving pays, in numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.algorithms import DEFAULT_THRESHOLDS
from ds_hybrid.rebalance.policy import (
    Costs,
    LayerOutlook,
    Patience,
    describe,
    describe_measured,
    event_pays,
    is_unconditional,
    measured_gain,
    outlook,
)

COSTS = Costs(seconds_per_pair=1e-6, seconds_per_move=0.01, seconds_per_move_across=0.04, seconds_per_event=0.02)
LOAD = np.array([3000, 1000, 1000, 1000, 2000, 0, 0, 0])
CURRENT = ExpertPlacement.contiguous(8, 4)  # ranks have 4000, 2000, 2000, 0
BETTER = ExpertPlacement.from_slots([[0, 6], [2, 3], [4, 5], [1, 7]])  # 3000, 2000, 2000, 1000
NODES = [0, 0, 1, 1]


def plan(
    proposed: ExpertPlacement = BETTER,
    costs: Costs = COSTS,
    *,
    horizon: int = 200,
    min_gain: float = 0.02,
    nodes: list[int] = NODES,
    unconditional: bool = False,
) -> LayerOutlook:
    return outlook(
        LOAD,
        CURRENT,
        proposed,
        costs,
        horizon=horizon,
        min_gain=min_gain,
        node_of_rank=nodes,
        unconditional=unconditional,
    )


def test_outlook() -> None:
    """The busiest rank loses 1000 pairs of a microsecond; two experts cross nodes, each rank receiving one."""
    found = plan()
    assert (found.imbalance_before, found.imbalance_after, found.bound) == (2.0, 1.5, 1.5)
    assert (found.hottest_expert, found.hottest_load, found.needs_replication) == (0, 1.5, True)
    assert (found.num_moved, found.num_moved_across, found.num_moves_of_busiest) == (2, 2, 1)
    assert found.gain_seconds_per_step == pytest.approx(1e-3)
    assert found.cost_seconds == pytest.approx(0.04)
    assert (found.pays, found.reason) == (True, "earned back in 57 steps")  # 0.04 / (0.7 * 0.001)


def test_moves_inside_a_node_cost_less() -> None:
    found = plan(nodes=[0, 1, 1, 0])
    assert (found.num_moved, found.num_moved_across) == (2, 0)
    assert found.cost_seconds == pytest.approx(0.01)
    assert plan(nodes=[]).cost_seconds == pytest.approx(0.01)


def test_the_rank_with_the_costliest_moves_counts() -> None:
    """Rank 3 receives two from its own node, ranks 0 and 1 one each from the other."""
    proposed = ExpertPlacement.from_slots([[4, 1], [5, 3], [6, 7], [0, 2]])
    found = plan(proposed)
    assert (found.num_moved, found.num_moved_across) == (6, 4)
    assert found.cost_seconds == pytest.approx(0.08)  # rank 3: experts 0 and 2, across
    assert found.num_moves_of_busiest == 2


@pytest.mark.parametrize(
    ("found", "pays", "reason"),
    [
        (plan(CURRENT), False, "no better placement"),
        (plan(min_gain=0.5), True, "earned back in 57 steps"),
        (plan(min_gain=0.51), False, "the busiest rank would lose 0.500 of the mean, less than min_gain 0.51"),
        (plan(horizon=85), False, "59.5 ms to be saved in 85 steps, less than 1.5 times the cost"),  # 0.7 * 85 ms
        (plan(horizon=86), True, "earned back in 57 steps"),
        (plan(costs=Costs(1e-6, 0, 0)), True, "costs nothing"),
        (plan(ExpertPlacement.from_slots([[0, 1], [4, 3], [2, 5], [6, 7]])), False, "the busiest rank gains nothing"),
        (
            plan(ExpertPlacement.from_slots([[0, 1], [4, 3], [2, 5], [6, 7]]), unconditional=True),
            True,
            "moves whatever it brings",
        ),
        (plan(CURRENT, unconditional=True), False, "no better placement"),
    ],
)
def test_verdicts(found: LayerOutlook, pays: bool, reason: str) -> None:
    assert (found.pays, found.reason) == (pays, reason)


def test_only_the_articles_rule_moves_without_asking() -> None:
    assert is_unconditional("article_round_robin")
    assert not is_unconditional("swap")


def test_a_layer_that_ran_nothing_stays() -> None:
    found = outlook(np.zeros(8), CURRENT, CURRENT, COSTS, horizon=200, min_gain=0.02)
    assert (found.imbalance_before, found.bound, found.needs_replication, found.pays) == (0.0, 1.0, False, False)


def test_a_layer_without_a_hot_expert_needs_no_replication() -> None:
    even = outlook(np.full(8, 5), CURRENT, CURRENT, COSTS, horizon=200, min_gain=0.02)
    assert not even.needs_replication
    alone = outlook(np.arange(8), ExpertPlacement.contiguous(8, 8), CURRENT8, COSTS, horizon=200, min_gain=0.02)
    assert alone.hottest_load == 2.0


CURRENT8 = ExpertPlacement.contiguous(8, 8)


def test_prices_of_swaps() -> None:
    """Half of the 15 ms that a swap must earn, over the 140 ms of 1000 pairs, the mean, in 200 steps at 0.7."""
    assert COSTS.cross_node_penalty == 4.0
    thresholds = COSTS.thresholds(LOAD, horizon=200)
    assert thresholds.target == DEFAULT_THRESHOLDS.target
    assert thresholds.price == pytest.approx(0.0075 / 0.14)
    free = Costs(seconds_per_pair=1e-6, seconds_per_move=0.0, seconds_per_move_across=0.0)
    assert free.thresholds(LOAD, horizon=200) == DEFAULT_THRESHOLDS
    assert free.cross_node_penalty == 1.0
    assert COSTS.thresholds(np.zeros(8), horizon=200) == DEFAULT_THRESHOLDS
    assert replace(COSTS, seconds_per_move_across=0.001).cross_node_penalty == 1.0


def test_an_event_must_pay_for_itself() -> None:
    """Over its own moves a layer saves 0.14 - 1.5 * 0.04 = 0.08 s; the event must not cost more than that / 1.5."""
    pays, does_not = plan(), plan(horizon=1)
    assert event_pays([pays, does_not], COSTS, horizon=200)
    dear = replace(COSTS, seconds_per_event=0.054)
    assert not event_pays([pays, does_not], dear, horizon=200)
    assert event_pays([pays, pays], dear, horizon=200)
    assert not event_pays([does_not], replace(COSTS, seconds_per_event=0.0), horizon=200)
    assert not event_pays([], replace(COSTS, seconds_per_event=0.0), horizon=200)


def test_measured_gain_places_the_same_tokens_both_ways() -> None:
    since = np.array([100, 900, 400, 100, 100, 100, 800, 500])  # before 1000, 500, 200, 1300; after 900, 500, 200, 1400
    assert measured_gain(since, CURRENT, BETTER, COSTS) == pytest.approx(-100e-6)
    assert measured_gain(LOAD, CURRENT, BETTER, COSTS) == pytest.approx(1e-3)


def test_two_losses_in_a_row_double_the_interval() -> None:
    def factors(*gains: float) -> list[int]:
        patience, found = Patience(), []
        for gain in gains:
            patience = patience.after(gain)
            found.append(patience.factor)
        return found

    assert factors(-1, -1) == [1, 2]
    assert factors(-1, 1, -1, 1, -1) == [1, 1, 1, 1, 1]
    assert factors(-1, -1, -1, -1, -1) == [1, 2, 2, 4, 4]
    assert factors(-1, -1, -1, -1, 1, 1, 1) == [1, 2, 2, 4, 2, 1, 1]
    assert factors(-1, 0, -1) == [1, 1, 2]


def test_a_layer_is_due_when_its_interval_is_over() -> None:
    patience = Patience().looked(100)
    assert next(step for step in range(100, 300) if patience.is_due(step, interval=50)) == 150
    patient = patience.after(-1).after(-1)
    assert next(step for step in range(100, 300) if patient.is_due(step, interval=50)) == 200
    assert not patient.looked(200).is_due(299, interval=50)
    assert patient.looked(200).is_due(300, interval=50)


def test_trouble_comes_before_the_interval_but_not_at_once() -> None:
    def first(patience: Patience, imbalance: float) -> int:
        return next(
            step
            for step in range(100, 300)
            if patience.is_due(step, interval=50, imbalance=imbalance, threshold=1.2, rest=10)
        )

    patience = Patience().looked(100)
    assert first(patience, 1.19) == 150
    assert first(patience, 1.21) == 110
    assert first(patience.after(-1).after(-1), 1.21) == 120


def test_patience_survives_a_checkpoint() -> None:
    patience = Patience().looked(70).after(-1).after(-1).after(-1)
    assert Patience.from_json(json.loads(json.dumps(patience.to_json()))) == patience
    assert (patience.last_look, patience.factor, patience.num_losses) == (70, 2, 1)


def test_what_the_log_says() -> None:
    assert describe("layers.3", plan()) == [
        "layers.3: moves 2 experts (2 across nodes), busiest rank 2.000 -> 1.500 of the mean, at best 1.500; gain 1 ms "
        "a step, cost 40 ms: earned back in 57 steps",
        "layers.3: needs replication (or a stronger balance loss): expert 0 alone is 1.50 of a rank's fair share",
    ]
    assert describe("layers.3", plan(horizon=10))[0] == (
        "layers.3: would move 2 experts (2 across nodes), busiest rank 2.000 -> 1.500 of the mean, at best 1.500; gain "
        "1 ms a step, cost 40 ms: 7 ms to be saved in 10 steps, less than 1.5 times the cost"
    )
    even = outlook(np.full(8, 5), CURRENT, CURRENT, COSTS, horizon=200, min_gain=0.02)
    assert describe("moe", even) == ["moe: stays, busiest rank 1.000 of the mean, at best 1.000: no better placement"]
    told = describe_measured("moe", predicted=1e-3, measured=-2.5e-4)
    assert told == "moe: measured gain -0.25 ms a step, predicted 1 ms"
