"""Rebalancing in a training run: what it counts, when it moves, and that losses do not notice."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ds_hybrid
from ds_hybrid.dispatch.predict import GroupSpeed
from ds_hybrid.dispatch.spans import is_in_backward
from ds_hybrid.engine import expert_costs, rebalancer
from ds_hybrid.engine.step_loads import StepLoads
from ds_hybrid.errors import PlacementError
from tests.multirank import explicit
from tests.multirank.test_moving_experts import CONVERTED, EXPLICIT, loss_of, losses_of
from tests.multirank.training import Run, make_prepared
from tests.ranks import RankPool

EAGER = {"enabled": True, "interval": 3, "load_half_life": 3, "horizon": 10**6, "min_gain": 0.0}
"""Moves whatever gains anything, so that a short run moves."""


@dataclass(frozen=True)
class Story:
    """A run as rank 0 tells it.

    Attributes:
        losses: the mean of all ranks.
        log: lines of the rebalancer.
        placements: by layer, [P][E/P], at the end.
        imbalance: the busiest rank's share of a layer's pairs in the last steps, over the mean.
    """

    losses: list[float]
    log: list[str]
    placements: dict[str, list[list[int]]]
    imbalance: dict[str, float]
    states: Any = field(default=None, repr=False)


def run_with(run: Run | explicit.Setup, rebalance: dict[str, Any], *, num_steps: int = 12) -> Story:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebalancer, "_log", lines.append)
        engine = make_engine(run, rebalance)
        losses = losses_of(engine, run, num_steps)
    placements = {name: layer.placement for name, layer in engine.moe_layers_by_name().items()}
    imbalance = {}
    for layer in engine.moe_stats().layers:
        pairs = np.array(layer.expert_load)[placements[layer.name].expert_of_slot].sum(1)
        imbalance[layer.name] = float(pairs.max() / pairs.mean())
    states = None if engine._rebalancer is None else engine._rebalancer.state()
    engine.destroy()
    return Story(losses, lines, {n: p.expert_of_slot.tolist() for n, p in placements.items()}, imbalance, states)


def make_engine(run: Run | explicit.Setup, rebalance: dict[str, Any]) -> Any:
    if isinstance(run, Run):
        model: Any = make_prepared(run)
    else:
        model = explicit.Toy(run)
    config = run.ds_config()
    config["ds_hybrid"]["rebalance"] = rebalance
    return ds_hybrid.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


@pytest.mark.parametrize("run", [CONVERTED, replace(CONVERTED, ep_size=4, zero_stage=3), EXPLICIT])
def test_losses_do_not_notice_and_ranks_are_relieved(four_ranks: RankPool, run: Run | explicit.Setup) -> None:
    moved = four_ranks.run(run_with, run, EAGER)
    still = four_ranks.run(run_with, run, {"enabled": False})
    for one, other in zip(moved, still, strict=True):
        assert one.losses == pytest.approx(other.losses, abs=1e-6, rel=0)
        assert one.placements == moved[0].placements
        assert one.placements != other.placements
        if isinstance(run, Run):  # the explicit layer's four experts are even enough as they are
            assert sum(one.imbalance.values()) < sum(other.imbalance.values())
    log = "\n".join(moved[0].log)
    assert re.search(r"step \d+: moved \d+ experts of \d layers in \d", log)
    assert re.search(r"moves \d+ experts \(0 across nodes\), busiest rank .* gain .* a step, cost ", log)
    assert re.search(r"measured gain .* a step, predicted ", log)


def test_a_dry_run_tells_and_moves_nothing(four_ranks: RankPool) -> None:
    for story in four_ranks.run(run_with, CONVERTED, EAGER | {"dry_run": True}):
        assert "step 3: dry run, nothing moves" in story.log
        assert any("moves" in line and "busiest rank" in line for line in story.log)
        assert set(map(str, story.placements.values())) == {"[[0, 1, 2, 3], [4, 5, 6, 7]]"}


def test_static_placement_never_moves(four_ranks: RankPool) -> None:
    for story in four_ranks.run(run_with, CONVERTED, EAGER | {"algorithm": "static"}):
        assert not any("moved" in line for line in story.log)


def test_the_threshold_comes_before_the_interval(four_ranks: RankPool) -> None:
    """The tiny model's layers are out of balance from the first step on; ten steps are the least between two looks."""
    for threshold, moves in ((1.01, True), (50.0, False)):
        options = EAGER | {"interval": 1000, "threshold": threshold}
        for story in four_ranks.run(run_with, CONVERTED, options):
            assert any(line.startswith("step 10: moved") for line in story.log) == moves


def test_a_move_that_fails_is_told_and_training_goes_on(four_ranks: RankPool) -> None:
    for story in four_ranks.run(run_with_failing_moves):
        assert "step 3: rank 1 could not: no memory. Training goes on." in story.log
        assert len(story.losses) == 12
        assert set(map(str, story.placements.values())) == {"[[0, 1, 2, 3], [4, 5, 6, 7]]"}


def run_with_failing_moves() -> Story:
    def fail(*args: Any) -> None:
        raise PlacementError("rank 1 could not: no memory.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds_hybrid.engine.engine.move_experts", fail)
        return run_with(CONVERTED, EAGER)


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
def test_counts_are_those_of_the_step_before_of_all_ranks_and_of_training_alone(
    four_ranks: RankPool, checkpointing: bool | None
) -> None:
    run = replace(CONVERTED, checkpointing=checkpointing, mode="two_stage")
    for counts, routed in four_ranks.run(counted_and_routed, run):
        assert counts == routed


def counted_and_routed(run: Run) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """By step and layer, [E]: what StepLoads gives, and what forward hooks on the routers saw in training."""
    engine = make_engine(run, {"enabled": False})
    layers = list(engine.moe_layers_by_name().values())
    seen: list[list[torch.Tensor]] = []

    def note(layer: Any, number: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            if module.training and not is_in_backward():
                seen[-1][number] += torch.bincount(output[1].flatten(), minlength=layer.num_experts)

        return hook

    for number, layer in enumerate(layers):
        layer.router.register_forward_hook(note(layer, number))
    loads = StepLoads(layers)
    given = []
    for step in range(3):
        seen.append([torch.zeros(layer.num_experts, dtype=torch.int64) for layer in layers])
        losses_of(engine, run, 1)
        engine.eval()
        with torch.no_grad():
            loss_of(engine, run, step, 0)
        engine.train()
        given.append(loads.after_step())
    assert given[0] is None
    counts = [*given[1:], loads.settle()]
    assert loads.settle() is None
    for step in seen:
        for of_layer in step:
            dist.all_reduce(of_layer)
    engine.destroy()
    return [[of.tolist() for of in step] for step in counts], [[of.tolist() for of in step] for step in seen]


def test_costs_are_those_that_were_measured_and_equal_on_all_ranks(four_ranks: RankPool) -> None:
    for per_pair, per_move, across in four_ranks.run(measured_costs):
        # Ranks 0 to 3 computed 1, 2, 3 and 4 s for 100 pairs; two replicas share each expert's pairs.
        assert per_pair == pytest.approx(3 * (1 + 2 + 3 + 4) / 100 / 2)
        # w1, w2 and w3 of 24 x 32 in fp32; one replica has the whole master and moments of some. 1e6 bytes a second.
        assert per_move == pytest.approx(3 * 24 * 32 * 4 * (1 + 3) / 1e6)
        assert across == per_move


def measured_costs() -> tuple[float, float, float]:
    run = replace(CONVERTED, zero_stage=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            expert_costs, "measure_link", lambda group: GroupSpeed(latency=0.0, bandwidth=1e6 * (1 + group.rank))
        )
        engine = make_engine(run, {"enabled": True})
        losses_of(engine, run, 2)
        meter = engine._rebalancer._costs
        meter.measure(engine.optimizer)
        layer = next(iter(engine.moe_layers_by_name().values()))
        layer.meter.computing._seconds += 1.0 + dist.get_rank()
        meter.count([100] * len(engine.moe_layers_by_name()))
        costs = meter.measure(engine.optimizer)[0]
        engine.destroy()
    return costs.seconds_per_pair, costs.seconds_per_move, costs.seconds_per_move_across
