"""Between steps: looks at the load of each layer's experts, and moves them when that pays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.logging import print_dist

from ds_hybrid.config import RebalanceConfig
from ds_hybrid.engine.expert_costs import CostMeter
from ds_hybrid.engine.step_loads import Counts, StepLoads
from ds_hybrid.errors import PlacementError
from ds_hybrid.moe.kinds import MoELayer
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.algorithms import lower_bound, rank_loads
from ds_hybrid.rebalance.load import ExpertLoad
from ds_hybrid.rebalance.look import Gain, Look, Move
from ds_hybrid.rebalance.migrate import MoveReport
from ds_hybrid.rebalance.policy import (
    Costs,
    LayerOutlook,
    Patience,
    describe,
    describe_measured,
    event_pays,
    is_unconditional,
    measured_gain,
    propose,
)


@dataclass(frozen=True)
class Trial:
    """A move whose gain is still to be measured.

    Attributes:
        moved_at: the step that it followed.
        before, after: where the layer's experts were, and where they are since.
        predicted: the gain in seconds per step.
        counts: [E] int64, the pairs of each expert since then.
        num_steps: how many steps that is.
    """

    moved_at: int
    before: ExpertPlacement
    after: ExpertPlacement
    predicted: float
    counts: npt.NDArray[np.int64]
    num_steps: int = 0

    def with_step(self, counts: npt.NDArray[np.int64]) -> Trial:
        return replace(self, counts=self.counts + counts, num_steps=self.num_steps + 1)


@dataclass(frozen=True)
class LayerWatch:
    """What is known of one layer.

    Attributes:
        told: whether the log has said that the layer needs replication.
    """

    load: ExpertLoad
    patience: Patience
    trial: Trial | None = None
    told: bool = False

    def with_step(self, counts: npt.NDArray[np.int64]) -> LayerWatch:
        trial = None if self.trial is None else self.trial.with_step(counts)
        return replace(self, load=self.load.after(counts), trial=trial)

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint. The trial is left out, so what the last move before it brought is not measured."""
        return {"load": self.load.to_json(), "patience": self.patience.to_json()}

    @classmethod
    def from_json(cls, state: Mapping[str, Any], *, half_life: float) -> LayerWatch:
        """What :meth:`to_json` gave."""
        return cls(ExpertLoad.from_json(state["load"], half_life=half_life), Patience.from_json(state["patience"]))


class Rebalancer:
    """Decides for all layers from the same integers and figures on all ranks, which call it together.

    Args:
        layers: of the model, in one order on every rank.
        move: brings experts to other ranks, as :meth:`ds_hybrid.MoEEngine.move_experts`.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        config: RebalanceConfig,
        costs: CostMeter,
        move: Callable[[Mapping[str, ExpertPlacement]], MoveReport],
    ) -> None:
        self._layers = {layer.layer_name: layer for layer in layers}
        self._config = config
        self._costs = costs
        self._move = move
        self._step_loads = StepLoads(layers)
        self._is_off = False
        self._watches = {name: self._new_watch(layer) for name, layer in self._layers.items()}

    def after_step(self, step: int, optimizer: Any) -> Look | None:
        """Count the pairs of the step before ``step``, and look at the layers whose time has come, if any has."""
        if self._is_off:
            return None
        counts = self._step_loads.after_step()
        if counts is None:
            self._costs.begin()
        self._count(counts)
        due = [name for name in self._layers if self._is_due(name, step)]
        return self._look(due, step, optimizer) if due else None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run decides as the one that was not interrupted."""
        self._count(self._step_loads.settle())
        return {name: watch.to_json() for name, watch in self._watches.items()}

    def restore(self, state: Mapping[str, Any], *, step: int) -> None:
        """Go on from :meth:`state` at an optimizer step; layers that it does not know begin anew."""
        self._step_loads.settle()
        for name, layer in self._layers.items():
            if name in state:
                self._watches[name] = LayerWatch.from_json(state[name], half_life=self._config.load_half_life)
            else:
                self._watches[name] = self._new_watch(layer, step=step)

    def _new_watch(self, layer: MoELayer, *, step: int = 0) -> LayerWatch:
        unknown = ExpertLoad.unknown(layer.num_experts, half_life=self._config.load_half_life)
        return LayerWatch(unknown, Patience(last_look=step))

    def _count(self, counts: Counts | None) -> None:
        if counts is None:
            return
        self._costs.count([int(of_layer.sum()) for of_layer in counts])
        for name, of_layer in zip(self._layers, counts, strict=True):
            self._watches[name] = self._watches[name].with_step(of_layer)

    def _is_due(self, name: str, step: int) -> bool:
        watch, threshold = self._watches[name], self._config.threshold
        if threshold is None:
            return watch.patience.is_due(step, interval=self._config.interval)
        placement, forecast = self._layers[name].placement, watch.load.forecast
        busiest = rank_loads(forecast, placement.rank_of_expert, placement.num_ranks).max()
        imbalance = busiest / lower_bound(forecast, placement.num_ranks) if forecast.any() else 1.0
        return watch.patience.is_due(
            step, interval=self._config.interval, imbalance=float(imbalance), threshold=threshold
        )

    def _look(self, due: Sequence[str], step: int, optimizer: Any) -> Look:
        self._count(self._step_loads.settle())  # measured are the seconds of this step too
        try:
            costs = dict(zip(self._layers, self._costs.measure(optimizer), strict=True))
        except PlacementError as error:
            _log(f"step {step}: off from now on: {error}")
            self._is_off = True
            return Look("off", str(error))
        began = time.perf_counter()
        targets, outlooks = {}, {}
        gains: list[Gain] = []
        for name in due:
            gains += self._measure(name, costs[name])
            targets[name], outlooks[name] = self._propose(name, costs[name])
            self._watches[name] = replace(self._watches[name], patience=self._watches[name].patience.looked(step))
        paying = [name for name in due if outlooks[name].pays]
        worth_it = event_pays(list(outlooks.values()), costs[due[0]], horizon=self._config.horizon)
        carry_out = bool(paying) and (worth_it or is_unconditional(self._config.algorithm))
        for name in due:
            self._tell(name, outlooks[name], planned=carry_out and outlooks[name].pays)
        if paying and not carry_out:
            seconds = costs[due[0]].seconds_per_event
            reason = f"moves of {len(paying)} layers would pay, but not an event of {seconds:.3f} s for them"
            self._costs.refuse_event()
            look = Look("too_costly", reason)
        elif carry_out and self._config.dry_run:
            look = Look("dry_run", "dry run, nothing moves")
        elif carry_out:
            look = self._carry_out({name: targets[name] for name in paying}, outlooks, step, began)
        else:
            worst = max(due, key=lambda name: outlooks[name].imbalance_before)
            look = Look("stays", f"nothing moves; {describe(worst, outlooks[worst])[0]}")
        _log(f"step {step}: {look.reason}")
        return replace(look, outlooks=outlooks, gains=tuple(gains))

    def _measure(self, name: str, costs: Costs) -> list[Gain]:
        """Close the trial of the last move, if there is one."""
        watch = self._watches[name]
        if watch.trial is None or not watch.trial.num_steps:
            return []
        trial = watch.trial
        gain = measured_gain(trial.counts / trial.num_steps, trial.before, trial.after, costs)
        _log(describe_measured(name, predicted=trial.predicted, measured=gain))
        self._watches[name] = replace(watch, patience=watch.patience.after(gain), trial=None)
        return [Gain(name, trial.moved_at, trial.predicted, gain)]

    def _propose(self, name: str, costs: Costs) -> tuple[ExpertPlacement, LayerOutlook]:
        layer, load, config = self._layers[name], self._watches[name].load.forecast, self._config
        return propose(
            config.algorithm,
            load,
            layer.placement,
            costs,
            horizon=config.horizon,
            min_gain=config.min_gain,
            node_of_rank=self._costs.node_of_rank(layer),
        )

    def _tell(self, name: str, plan: LayerOutlook, *, planned: bool) -> None:
        """A line for what is planned; one for a layer that no placement can even out, when that is new."""
        line, *needs_replication = describe(name, plan)
        if planned:
            _log(line)
        if not self._watches[name].told:
            for line in needs_replication:
                _log(line)
        self._watches[name] = replace(self._watches[name], told=plan.needs_replication)

    def _carry_out(
        self, targets: Mapping[str, ExpertPlacement], outlooks: Mapping[str, LayerOutlook], step: int, began: float
    ) -> Look:
        before = {name: self._layers[name].placement for name in targets}
        predicted = sum(outlooks[name].cost_seconds for name in targets)
        try:
            report = self._move(targets)
        except PlacementError as error:
            return Look("failed", f"{error} Training goes on.")
        get_accelerator().synchronize()
        seconds = time.perf_counter() - began
        self._costs.add_event(seconds - predicted)
        for name in targets:
            layer, watch = self._layers[name], self._watches[name]
            nothing = np.zeros(layer.num_experts, dtype=np.int64)
            trial = Trial(step, before[name], layer.placement, outlooks[name].gain_seconds_per_step, nothing)
            self._watches[name] = replace(watch, trial=trial)
        reason = (
            f"moved {report.num_moved} experts of {len(targets)} layers in {seconds:.3f} s, moves alone predicted "
            f"{predicted:.3f} s; rank 0 sent {report.bytes_sent} bytes"
        )
        return Look("moved", reason, move=Move(tuple(targets), report.num_moved, seconds, predicted, report.bytes_sent))


def _log(line: str) -> None:
    print_dist(f"ds_hybrid: rebalance: {line}", ranks=[0])
