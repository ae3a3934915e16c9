"""Between steps, each layer takes the dispatcher that its own routing and the links make quickest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.logging import print_dist

from ds_hybrid.dispatch.choose import DispatcherChange, decide
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.measure import measure_link
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.modes import Mode
from ds_hybrid.dispatch.predict import DemandTable, GroupSpeed, predicted_seconds
from ds_hybrid.dispatch.switch import DispatchSwitch

INTERVAL = 20
"""Steps between two choices; the first one follows the first step."""


class AutoDispatch:
    """Chooses for the layers whose mode is ``auto``. All ranks have the same layers and call it together.

    Every expert-parallel group predicts from its own demand; the slowest group counts, so all of them take the same
    mode. Rank 0 prints one line for each change.

    Args:
        switches: of all MoE layers, in model order.
    """

    def __init__(self, switches: Sequence[DispatchSwitch]) -> None:
        self._switches = [switch for switch in switches if len(switch.candidates) > 1]
        self._speeds: dict[Any, GroupSpeed] = {}
        self._num_steps = 0

    def after_step(self) -> list[DispatcherChange]:
        """Count an optimizer step, and choose if it is time; what changed."""
        self._num_steps += 1
        return self.choose() if self._switches and self._num_steps % INTERVAL == 1 else []

    def choose(self) -> list[DispatcherChange]:
        """Predict, agree and switch, for the demand since the last time. Measures the links the first time."""
        predictions = [_predict(switch, table, self._links(switch)) for switch, table in self._tables()]
        flat = [value for of_layer in predictions for value in of_layer.values()]
        slowest = torch.tensor(flat, device=get_accelerator().current_device_name())
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        agreed = iter(slowest.tolist())
        changes = []
        for switch, of_layer in zip(self._switches, predictions, strict=True):
            seconds = {mode: next(agreed) for mode in of_layer}
            if any(seconds.values()):  # a layer that was not called keeps its dispatcher
                changes += _switch_to_quickest(switch, seconds)
        return changes

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run dispatches as the one that was not interrupted."""
        modes = {switch.layer: switch.dispatcher.mode for switch in self._switches}
        return {"num_steps": self._num_steps, "modes": modes}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`. A mode that a layer may no longer use is left out."""
        self._num_steps = state["num_steps"]
        for switch in self._switches:
            mode = state["modes"].get(switch.layer)
            if mode in switch.candidates:
                switch.use(mode)

    def _tables(self) -> list[tuple[DispatchSwitch, DemandTable | None]]:
        """What the ranks of each layer's group asked for; one exchange for all layers of a group."""
        of_group: dict[Any, list[DispatchSwitch]] = {}
        for switch in self._switches:
            of_group.setdefault(switch.group.process_group, []).append(switch)
        tables: dict[DispatchSwitch, DemandTable | None] = {}
        for process_group, switches in of_group.items():
            demands = torch.stack([switch.take_demand() for switch in switches])
            gathered = RankGroup(process_group, Meter()).all_gather_metadata(demands).cpu().numpy()
            for number, switch in enumerate(switches):
                totals = gathered[:, number]
                tables[switch] = DemandTable.of(totals) if totals[:, -1].all() else None
        return [(switch, tables[switch]) for switch in self._switches]

    def _links(self, switch: DispatchSwitch) -> dict[Any, GroupSpeed]:
        for group in switch.ways.values():
            if group.process_group not in self._speeds:
                self._speeds[group.process_group] = measure_link(RankGroup(group.process_group, Meter()))
        return {way: self._speeds[group.process_group] for way, group in switch.ways.items()}


def _predict(switch: DispatchSwitch, table: DemandTable | None, links: dict[Any, GroupSpeed]) -> dict[Mode, float]:
    """Seconds in each candidate mode; zeros where the layer was not called."""
    if table is None:
        return dict.fromkeys(switch.candidates, 0.0)
    nodes = () if switch.nodes is None else switch.nodes.node_of_rank
    return {mode: predicted_seconds(mode, table, switch.shape, links, node_of_rank=nodes) for mode in switch.candidates}


def _switch_to_quickest(switch: DispatchSwitch, seconds: dict[Mode, float]) -> list[DispatcherChange]:
    switch.predicted = seconds
    current = switch.dispatcher.mode
    chosen = decide(current, seconds)
    if chosen == current:
        return []
    change = DispatcherChange(switch.layer, current, chosen, seconds)
    print_dist(f"ds_hybrid: {switch.layer}: dispatcher {current} -> {chosen}; {change.reason}", ranks=[0])
    switch.use(chosen)
    return [change]
