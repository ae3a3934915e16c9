"""Where experts are over a run, by the rules that decide it in training. Pure NumPy.

As ``engine/rebalancer.py`` does, every layer is looked at when its patience says so, proposed a placement, and measured
after a move; what the layers would save must be worth the event. Left out: looks before their time (``threshold``), and
that measured costs vary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ds_hybrid.config import RebalanceConfig
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.plan.popularity import Popularity
from ds_hybrid.rebalance.algorithms import Algorithm
from ds_hybrid.rebalance.load import ExpertLoad
from ds_hybrid.rebalance.policy import (
    Costs,
    EventCost,
    LayerOutlook,
    Patience,
    event_pays,
    is_unconditional,
    measured_gain,
    propose,
)

FloatArray = npt.NDArray[np.float64]


_DEFAULT = RebalanceConfig()


@dataclass(frozen=True)
class RebalancePolicy:
    """When experts move. The first decision is after ``first`` steps; until then they are contiguous."""

    algorithm: Algorithm
    interval: int = _DEFAULT.interval
    half_life: float = _DEFAULT.load_half_life
    min_gain: float = _DEFAULT.min_gain
    horizon: int = _DEFAULT.horizon
    first: int = _DEFAULT.interval


@dataclass(frozen=True, eq=False)
class Window:
    """Steps ``first`` to ``last`` - 1, for which experts stay where they are.

    Attributes:
        placements: of each layer.
        num_moved, num_moved_across: experts that moved before the first step, in one group; across nodes.
        seconds: what that took, with the event around the moves.
    """

    first: int
    last: int
    placements: tuple[ExpertPlacement, ...]
    num_moved: int = 0
    num_moved_across: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Watch:
    """What is known of one layer; where its experts were before the last move, which is still to be measured."""

    placement: ExpertPlacement
    patience: Patience
    before: ExpertPlacement | None = None
    moved_at: int = 0


def windows(
    popularity: Popularity, ep_size: int, policy: RebalancePolicy, costs: Costs, *, node_of_rank: Sequence[int] = ()
) -> Iterator[Window]:
    """Where experts are over the run.

    Args:
        costs: for pairs in the units of ``popularity.weights``. What an event takes is not known before the first one,
            as in training.
    """
    num_steps, num_layers, num_experts = popularity.weights.shape
    contiguous = ExpertPlacement.contiguous(num_experts, ep_size)
    if policy.algorithm == "static":
        yield Window(0, num_steps, (contiguous,) * num_layers)
        return
    first = min(policy.first, num_steps)
    if first:
        yield Window(0, first, (contiguous,) * num_layers)
    watches = [_Watch(contiguous, Patience(last_look=policy.first - policy.interval))] * num_layers
    event = EventCost()
    # Layers side by side in one array: a decayed mean takes each element alone.
    load = ExpertLoad.unknown(num_layers * num_experts, half_life=policy.half_life)
    listened = 0
    for begin in range(first, num_steps, policy.interval):
        for step in range(listened, begin):
            load = load.after(popularity.weights[step].ravel())
        listened = begin
        due = [layer for layer in range(num_layers) if watches[layer].patience.is_due(begin, interval=policy.interval)]
        for layer in due:
            watches[layer] = _measured(watches[layer], popularity.weights[:begin, layer], costs)
        forecasts = load.forecast.reshape(num_layers, num_experts)
        known = replace(costs, seconds_per_event=event.seconds)
        moves = _moves(due, forecasts, watches, policy, known, node_of_rank)
        outlooks = [outlook for _, outlook in moves.values()]
        for layer in due:
            watches[layer] = replace(watches[layer], patience=watches[layer].patience.looked(begin))
        carry_out = event_pays(outlooks, known, horizon=policy.horizon) or is_unconditional(policy.algorithm)
        if moves and not carry_out:
            event = event.refused()
            outlooks = []
        elif moves:
            event = event.after(costs.seconds_per_event)
            for layer, (target, _) in moves.items():
                watches[layer] = replace(
                    watches[layer], placement=target, before=watches[layer].placement, moved_at=begin
                )
        yield Window(
            begin,
            min(begin + policy.interval, num_steps),
            tuple(watch.placement for watch in watches),
            num_moved=sum(plan.num_moved for plan in outlooks),
            num_moved_across=sum(plan.num_moved_across for plan in outlooks),
            seconds=sum(plan.cost_seconds for plan in outlooks) + (costs.seconds_per_event if outlooks else 0.0),
        )


def _measured(watch: _Watch, weights: npt.NDArray[np.floating] | npt.NDArray[np.int64], costs: Costs) -> _Watch:
    """Close the trial of the last move, if there is one; ``weights`` [S, E] are those of the steps until now."""
    if watch.before is None:
        return watch
    since = weights[watch.moved_at :].mean(0, dtype=np.float64)
    gain = measured_gain(since, watch.before, watch.placement, costs)
    return replace(watch, patience=watch.patience.after(gain), before=None)


def _moves(
    due: Sequence[int],
    forecasts: FloatArray,
    watches: Sequence[_Watch],
    policy: RebalancePolicy,
    costs: Costs,
    node_of_rank: Sequence[int],
) -> dict[int, tuple[ExpertPlacement, LayerOutlook]]:
    """Layer -> where its experts would better be, of those for which moving pays."""
    proposals = {
        layer: propose(
            policy.algorithm,
            forecasts[layer],
            watches[layer].placement,
            costs,
            horizon=policy.horizon,
            min_gain=policy.min_gain,
            node_of_rank=node_of_rank,
        )
        for layer in due
    }
    return {layer: proposal for layer, proposal in proposals.items() if proposal[1].pays}
