"""When it pays to move a layer's experts, by measured costs; and what to say about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.algorithms import (
    DEFAULT_THRESHOLDS,
    Algorithm,
    Thresholds,
    lower_bound,
    new_placement,
    rank_loads,
)

FORECAST_HOLDS: Final = 0.7
"""The part of a predicted gain to count on. Loads of late training correlate by 0.8 to 0.99 over 200 steps, early ones
hardly at all; a layer for which it was too much to hope for is then looked at less often, see :class:`Patience`."""

SAFETY: Final = 1.5
"""A move must earn so many times its cost."""


@dataclass(frozen=True)
class Costs:
    """What was measured, in seconds.

    Attributes:
        seconds_per_pair: an expert's forward and backward for one (token, choice) pair.
        seconds_per_move: the state of one expert over a link inside a node.
        seconds_per_move_across: the same between nodes.
        seconds_per_event: a rebalance besides its moves: planning, agreeing, waiting for each other.
    """

    seconds_per_pair: float
    seconds_per_move: float
    seconds_per_move_across: float
    seconds_per_event: float = 0.0

    @property
    def cross_node_penalty(self) -> float:
        """How many times a move inside a node one across nodes costs."""
        return max(self.seconds_per_move_across / self.seconds_per_move, 1.0) if self.seconds_per_move else 1.0

    def thresholds(self, load: npt.ArrayLike, *, horizon: int) -> Thresholds:
        """For ``swap``: no expert moves that does not earn its way within ``horizon`` steps; ``load`` [E] pairs a step.

        Links send and receive at once: the two experts of a swap cost the busiest rank one move.
        """
        earned = FORECAST_HOLDS * horizon * self.seconds_per_pair * float(np.asarray(load, dtype=np.float64).mean())
        price = SAFETY * self.seconds_per_move / 2 / earned if earned else 0.0
        return replace(DEFAULT_THRESHOLDS, price=max(DEFAULT_THRESHOLDS.price, price))


@dataclass(frozen=True)
class LayerOutlook:
    """What a proposed placement of one layer would bring and cost. Loads are fractions of the ranks' mean.

    Attributes:
        imbalance_before: the busiest rank's forecast load where the experts are.
        imbalance_after: the same where they would be.
        bound: what no placement can go below.
        hottest_expert: the expert with the highest load.
        hottest_load: its load alone.
        num_moved: experts that would change rank.
        num_moved_across: those of them that would change node.
        num_moves_of_busiest: how many the rank with the costliest moves would receive, which is what it would send.
        gain_seconds_per_step: forecast, not discounted.
        cost_seconds: of the moves alone.
        pays: whether to move.
        reason: why, or why not.
    """

    imbalance_before: float
    imbalance_after: float
    bound: float
    hottest_expert: int
    hottest_load: float
    num_moved: int
    num_moved_across: int
    num_moves_of_busiest: int
    gain_seconds_per_step: float
    cost_seconds: float
    pays: bool
    reason: str

    @property
    def needs_replication(self) -> bool:
        """Whether one expert alone exceeds its rank's fair share: no placement can even out this layer."""
        return self.hottest_load > 1.0


def outlook(
    load: npt.ArrayLike,
    current: ExpertPlacement,
    proposed: ExpertPlacement,
    costs: Costs,
    *,
    horizon: int,
    min_gain: float,
    node_of_rank: Sequence[int] = (),
    unconditional: bool = False,
) -> LayerOutlook:
    """Whether one layer's experts should move from ``current`` to ``proposed``.

    They should if the busiest rank's forecast load falls by ``min_gain`` of the mean at least, and the time that saves
    in ``horizon`` steps, discounted by FORECAST_HOLDS, exceeds SAFETY times the cost of the moves.

    Args:
        load: [E] forecast (token, choice) pairs of a step, all ranks together.
        node_of_rank: for each rank the node that it is on; empty is one node.
        unconditional: move whatever comes of it, for algorithms that are there for comparison.
    """
    loads, num_ranks = np.asarray(load, dtype=np.float64), current.num_ranks
    mean = loads.sum() / num_ranks
    scale = 1 / mean if mean else 0.0
    before, after = (rank_loads(loads, each.rank_of_expert, num_ranks).max() for each in (current, proposed))
    inside, across = _arrivals(current, proposed, np.asarray(node_of_rank or [0] * num_ranks))
    seconds = inside * costs.seconds_per_move + across * costs.seconds_per_move_across
    slowest = int(seconds.argmax()) if seconds.any() else int((inside + across).argmax())
    hottest = int(loads.argmax())
    gain, cost = float(before - after) * costs.seconds_per_pair, float(seconds[slowest])
    fall, num_moved = float(before - after) * scale, int(inside.sum() + across.sum())
    pays, reason = _verdict(
        num_moved, fall, gain, cost, horizon=horizon, min_gain=min_gain, unconditional=unconditional
    )
    return LayerOutlook(
        imbalance_before=float(before * scale),
        imbalance_after=float(after * scale),
        bound=lower_bound(loads, num_ranks) * scale if mean else 1.0,
        hottest_expert=hottest,
        hottest_load=float(loads[hottest] * scale),
        num_moved=num_moved,
        num_moved_across=int(across.sum()),
        num_moves_of_busiest=int(inside[slowest] + across[slowest]),
        gain_seconds_per_step=gain,
        cost_seconds=cost,
        pays=pays,
        reason=reason,
    )


def propose(
    algorithm: Algorithm,
    load: npt.ArrayLike,
    current: ExpertPlacement,
    costs: Costs,
    *,
    horizon: int,
    min_gain: float,
    node_of_rank: Sequence[int] = (),
    cross_node_penalty: float | None = None,
) -> tuple[ExpertPlacement, LayerOutlook]:
    """Where an algorithm would have one layer's experts, and whether to move them there.

    Args:
        cross_node_penalty: what a move across nodes costs compared with one inside; None: what ``costs`` say.
    """
    proposed = new_placement(
        algorithm,
        load,
        current,
        node_of_rank=node_of_rank,
        cross_node_penalty=costs.cross_node_penalty if cross_node_penalty is None else cross_node_penalty,
        thresholds=costs.thresholds(load, horizon=horizon),
    )
    plan = outlook(
        load,
        current,
        proposed,
        costs,
        horizon=horizon,
        min_gain=min_gain,
        node_of_rank=node_of_rank,
        unconditional=is_unconditional(algorithm),
    )
    return proposed, plan


def is_unconditional(algorithm: Algorithm) -> bool:
    """Whether what the algorithm says is done without asking if it pays: the article knows no such question."""
    return algorithm == "article_round_robin"


def event_pays(outlooks: Sequence[LayerOutlook], costs: Costs, *, horizon: int) -> bool:
    """Whether what the layers that pay save over their own moves is worth interrupting the run."""
    paying = [each for each in outlooks if each.pays]
    saved = sum(FORECAST_HOLDS * horizon * each.gain_seconds_per_step - SAFETY * each.cost_seconds for each in paying)
    return bool(paying) and saved >= SAFETY * costs.seconds_per_event


@dataclass(frozen=True)
class EventCost:
    """What a rebalance takes besides its moves, as far as it is known: 0 before the first one.

    One that was slow by chance must not forbid all that would follow: the figure at most doubles with an event, and
    halves with each that is refused for it.
    """

    seconds: float = 0.0

    def after(self, seconds: float) -> EventCost:
        """After an event that took ``seconds``."""
        return EventCost(min(seconds, 2 * self.seconds) if self.seconds else seconds)

    def refused(self) -> EventCost:
        """After an event that cost too much for what it would bring."""
        return EventCost(self.seconds / 2)


def measured_gain(loads_since: npt.ArrayLike, before: ExpertPlacement, after: ExpertPlacement, costs: Costs) -> float:
    """Seconds per step that a move from ``before`` to ``after`` has saved, below 0 if it has cost some.

    ``loads_since`` [E] are the mean pairs of a step since then: the same tokens are placed both ways.
    """
    loads = np.asarray(loads_since, dtype=np.float64)
    was, is_now = (rank_loads(loads, each.rank_of_expert, each.num_ranks).max() for each in (before, after))
    return float(was - is_now) * costs.seconds_per_pair


@dataclass(frozen=True)
class Patience:
    """How often to look at one layer.

    Attributes:
        last_look: the step of the last decision about it.
        factor: how many intervals to wait until the next.
        num_losses: moves in a row whose measured gain was negative.
    """

    last_look: int = 0
    factor: int = 1
    num_losses: int = 0

    def is_due(
        self, step: int, *, interval: int, imbalance: float = 1.0, threshold: float = float("inf"), rest: int = 10
    ) -> bool:
        """Whether to look at the layer at ``step``: its interval is over, or ``rest`` steps are and it is in trouble.

        Args:
            step: the optimizer step.
            interval: steps between two looks, before the factor.
            imbalance: the busiest rank's forecast load over what is possible at best.
            threshold: the imbalance that is trouble.
            rest: least steps between two looks, before the factor.
        """
        waited = step - self.last_look
        return waited >= interval * self.factor or (imbalance > threshold and waited >= rest * self.factor)

    def looked(self, step: int) -> Patience:
        """After a decision at ``step``."""
        return replace(self, last_look=step)

    def after(self, gain: float) -> Patience:
        """After a move of known gain: two losses in a row double the interval, a gain halves it again."""
        if gain > 0:
            return replace(self, factor=max(self.factor // 2, 1), num_losses=0)
        if gain == 0 or self.num_losses == 0:
            return replace(self, num_losses=self.num_losses + (gain < 0))
        return replace(self, factor=2 * self.factor, num_losses=0)

    def to_json(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"last_look": self.last_look, "factor": self.factor, "num_losses": self.num_losses}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Patience:
        """What :meth:`to_json` gave."""
        return cls(**state)


def describe(layer: str, plan: LayerOutlook) -> list[str]:
    """What is decided about a layer, one line, and a second if placement alone cannot help it."""
    verb = "moves" if plan.pays else "would move"
    lines = [
        f"{layer}: {verb} {plan.num_moved} experts ({plan.num_moved_across} across nodes), busiest rank "
        f"{plan.imbalance_before:.3f} -> {plan.imbalance_after:.3f} of the mean, at best {plan.bound:.3f}; gain "
        f"{_ms(plan.gain_seconds_per_step)} a step, cost {_ms(plan.cost_seconds)}: {plan.reason}"
        if plan.num_moved
        else f"{layer}: stays, busiest rank {plan.imbalance_before:.3f} of the mean, at best {plan.bound:.3f}: "
        f"{plan.reason}"
    ]
    if plan.needs_replication:
        lines.append(
            f"{layer}: needs replication (or a stronger balance loss): expert {plan.hottest_expert} alone is "
            f"{plan.hottest_load:.2f} of a rank's fair share"
        )
    return lines


def describe_measured(layer: str, *, predicted: float, measured: float) -> str:
    """What a move has brought, in seconds per step."""
    return f"{layer}: measured gain {_ms(measured)} a step, predicted {_ms(predicted)}"


def _arrivals(
    current: ExpertPlacement, proposed: ExpertPlacement, nodes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """[P] and [P]: experts that each rank receives from its own node and from others."""
    old, new = current.rank_of_expert, proposed.rank_of_expert
    moved, crossed = old != new, nodes[old] != nodes[new]
    inside, across = (
        np.bincount(new[chosen], minlength=current.num_ranks) for chosen in (moved & ~crossed, moved & crossed)
    )
    return inside, across


def _verdict(
    num_moved: int, fall: float, gain: float, cost: float, *, horizon: int, min_gain: float, unconditional: bool
) -> tuple[bool, str]:
    earned = FORECAST_HOLDS * horizon * gain
    if not num_moved:
        return False, "no better placement"
    if unconditional:
        return True, "moves whatever it brings"
    if fall <= 0:
        return False, "the busiest rank gains nothing"
    if fall < min_gain:
        return False, f"the busiest rank would lose {fall:.3f} of the mean, less than min_gain {min_gain:g}"
    if earned < SAFETY * cost:
        return False, f"{_ms(earned)} to be saved in {horizon} steps, less than {SAFETY:g} times the cost"
    return True, f"earned back in {cost / (FORECAST_HOLDS * gain):.0f} steps" if gain and cost else "costs nothing"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
