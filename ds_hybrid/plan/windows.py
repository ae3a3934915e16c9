"""Where experts are over a run, by the files that decide it in training. Pure NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.plan.popularity import Popularity
from ds_hybrid.rebalance.algorithms import Algorithm
from ds_hybrid.rebalance.load import ExpertLoad
from ds_hybrid.rebalance.policy import Costs, propose

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RebalancePolicy:
    """When experts move. The first decision is after ``first`` steps; until then they are contiguous."""

    algorithm: Algorithm
    interval: int = 50
    half_life: float = 50.0
    min_gain: float = 0.05
    horizon: int = 200
    first: int = 50


@dataclass(frozen=True, eq=False)
class Window:
    """Steps ``first`` to ``last`` - 1, for which experts stay where they are.

    Attributes:
        placements: of each layer.
        num_moved, num_moved_across: experts that moved before the first step, in one group; across nodes.
        seconds: what that took.
    """

    first: int
    last: int
    placements: tuple[ExpertPlacement, ...]
    num_moved: int = 0
    num_moved_across: int = 0
    seconds: float = 0.0


def windows(
    popularity: Popularity, ep_size: int, policy: RebalancePolicy, costs: Costs, *, node_of_rank: Sequence[int] = ()
) -> Iterator[Window]:
    """Where experts are over the run; ``costs`` are for pairs in the units of ``popularity.weights``."""
    num_steps, num_layers, num_experts = popularity.weights.shape
    placements = (ExpertPlacement.contiguous(num_experts, ep_size),) * num_layers
    if policy.algorithm == "static":
        yield Window(0, num_steps, placements)
        return
    first = min(policy.first, num_steps)
    if first:
        yield Window(0, first, placements)
    # Layers side by side in one array: a decayed mean takes each element alone.
    load = ExpertLoad.unknown(num_layers * num_experts, half_life=policy.half_life)
    listened = 0
    for begin in range(first, num_steps, policy.interval):
        for step in range(listened, begin):
            load = load.after(popularity.weights[step].ravel())
        listened = begin
        window = _decided(load.forecast.reshape(num_layers, num_experts), placements, policy, costs, node_of_rank)
        placements = window.placements
        yield replace(window, first=begin, last=min(begin + policy.interval, num_steps))


def _decided(
    forecasts: FloatArray,
    placements: Sequence[ExpertPlacement],
    policy: RebalancePolicy,
    costs: Costs,
    node_of_rank: Sequence[int],
) -> Window:
    after, plans = [], []
    for forecast, current in zip(forecasts, placements, strict=True):
        proposed, plan = propose(
            policy.algorithm,
            forecast,
            current,
            costs,
            horizon=policy.horizon,
            min_gain=policy.min_gain,
            node_of_rank=node_of_rank,
        )
        after.append(proposed if plan.pays else current)
        plans += [plan] * plan.pays
    return Window(
        first=0,
        last=0,
        placements=tuple(after),
        num_moved=sum(plan.num_moved for plan in plans),
        num_moved_across=sum(plan.num_moved_across for plan in plans),
        seconds=sum(plan.cost_seconds for plan in plans),
    )
