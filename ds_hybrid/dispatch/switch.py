"""The dispatcher of a layer, which may be exchanged for another between steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hybrid.dispatch.allgather import AllGatherDispatcher
from ds_hybrid.dispatch.alltoall import AllToAllDispatcher
from ds_hybrid.dispatch.choose import candidates, choose_mode
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.demand import DemandTotal
from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.hierarchical import CutByNodes, HierarchicalDispatcher, NodeGroups
from ds_hybrid.dispatch.modes import Mode, WireDtype
from ds_hybrid.dispatch.predict import Way
from ds_hybrid.dispatch.replicated import ReplicatedDispatcher
from ds_hybrid.dispatch.traffic import WireShape
from ds_hybrid.dispatch.two_stage import TwoStageDispatcher
from ds_hybrid.errors import DispatchError, HybridError

_DISPATCHERS: dict[Mode, type[Dispatcher[Any]]] = {
    dispatcher.mode: dispatcher
    for dispatcher in (AllToAllDispatcher, AllGatherDispatcher, TwoStageDispatcher, ReplicatedDispatcher)
}


def make_dispatcher(
    mode: Mode,
    group: RankGroup,
    *,
    layer: str,
    guard: bool,
    wire_dtype: WireDtype = "auto",
    nodes: NodeGroups | None = None,
    watch: DemandTotal | None = None,
) -> Dispatcher[Any]:
    """The dispatcher of that name over ``group``. ``hierarchical`` also takes the ``nodes`` of the group.

    Raises:
        DispatchError: ``hierarchical`` without nodes.
    """
    options: dict[str, Any] = {"layer": layer, "guard": guard, "wire_dtype": wire_dtype, "watch": watch}
    options["node_of_rank"] = () if nodes is None else nodes.node_of_rank
    if mode != "hierarchical":
        return _DISPATCHERS[mode](group, **options)
    if nodes is None:
        raise DispatchError(
            f'{layer}: mode "hierarchical" needs its expert-parallel group cut by nodes. Pass the '
            "model to ds_hybrid.initialize, or choose another mode."
        )
    return HierarchicalDispatcher(group, nodes, **options)


class DispatchSwitch:
    """One dispatcher of the modes that a layer may use.

    Args:
        mode: its name, or ``"auto"``: several candidates, of which the one with the fewest bytes under uniform routing
            comes first.
        group: the expert-parallel group and the layer's meter.
        cut_by_nodes: gives the group's parts; without it ``"auto"`` does without ``hierarchical``.

    Attributes:
        nodes: the parts of the group, where they are of use.
        candidates: the modes to choose from.
        dispatcher: the present one.
        demand: what the layer's calls asked for, where there is a choice.
        predicted: seconds of a call in each candidate mode, as of the last choice; empty before.
    """

    def __init__(
        self,
        mode: Mode | Literal["auto"],
        group: RankGroup,
        shape: WireShape,
        *,
        layer: str,
        guard: bool,
        cut_by_nodes: CutByNodes | None = None,
    ) -> None:
        self.group, self.shape, self.layer, self.guard = group, shape, layer, guard
        self.nodes = _nodes_of(group, mode, cut_by_nodes)
        self.candidates = candidates(mode, num_ranks=group.size, spans_nodes=self.nodes is not None)
        self.demand = DemandTotal() if len(self.candidates) > 1 else None
        self.predicted: Mapping[Mode, float] = {}
        self.use(choose_mode(shape) if len(self.candidates) > 1 else self.candidates[0])

    def use(self, mode: Mode) -> None:
        """Dispatch in that mode from now on. All ranks of the group do so between the same two calls."""
        self.group.meter.mode = mode
        self.dispatcher = make_dispatcher(
            mode,
            self.group,
            layer=self.layer,
            guard=self.guard,
            wire_dtype=self.shape.wire_dtype,
            nodes=self.nodes,
            watch=self.demand,
        )

    def take_demand(self) -> Tensor:
        """What the calls since the last time asked for: as :meth:`DemandTotal.take`, zeros without calls."""
        taken = None if self.demand is None else self.demand.take()
        if taken is not None:
            return taken
        num_counts = (2 if self.nodes is None else 3) * self.group.size + 2
        return torch.zeros(num_counts, dtype=torch.int64, device=get_accelerator().current_device_name())

    @property
    def ways(self) -> dict[Way, RankGroup]:
        """The groups over which rows may travel."""
        if self.nodes is None:
            return {"group": self.group}
        return {"group": self.group, "across": self.nodes.across, "inside": self.nodes.inside}


def _nodes_of(group: RankGroup, mode: Mode | Literal["auto"], cut_by_nodes: CutByNodes | None) -> NodeGroups | None:
    if cut_by_nodes is None or group.size == 1 or mode not in ("auto", "hierarchical"):
        return None
    try:
        return cut_by_nodes(group.process_group).with_meter(group.meter)
    except HybridError:
        if mode == "hierarchical":
            raise
        return None
