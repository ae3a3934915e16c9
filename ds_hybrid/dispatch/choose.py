"""Which dispatcher a layer uses."""

from __future__ import annotations

from typing import Literal

from ds_hybrid.dispatch.allgather import AllGatherDispatcher
from ds_hybrid.dispatch.alltoall import AllToAllDispatcher
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.hierarchical import HierarchicalDispatcher, NodeGroups
from ds_hybrid.dispatch.modes import MODES, Mode, WireDtype
from ds_hybrid.dispatch.replicated import ReplicatedDispatcher
from ds_hybrid.dispatch.traffic import WireShape, expected_bytes
from ds_hybrid.dispatch.two_stage import TwoStageDispatcher
from ds_hybrid.errors import DispatchError

_DISPATCHERS: dict[Mode, type[Dispatcher]] = {
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
) -> Dispatcher:
    """The dispatcher of that name over ``group``. ``hierarchical`` also takes the ``nodes`` of the group.

    Raises:
        DispatchError: ``hierarchical`` without nodes.
    """
    if mode == "hierarchical":
        if nodes is None:
            raise DispatchError(f'{layer}: mode "hierarchical" needs an expert-parallel group that spans nodes.')
        return HierarchicalDispatcher(group, nodes, layer=layer, guard=guard, wire_dtype=wire_dtype)
    return _DISPATCHERS[mode](group, layer=layer, guard=guard, wire_dtype=wire_dtype)


def resolve_mode(mode: Mode | Literal["auto"], shape: WireShape, *, num_same_tokens: int = 1) -> Mode:
    """``mode``, or for ``"auto"`` the choice of :func:`choose_mode`."""
    return choose_mode(shape, num_same_tokens=num_same_tokens) if mode == "auto" else mode


def choose_mode(shape: WireShape, *, num_same_tokens: int = 1) -> Mode:
    """The mode that sends the fewest bytes under uniform routing; the simplest one where they tie.

    Args:
        num_same_tokens: ranks of a tensor-parallel group. When they are the expert-parallel group too, they may each
            dispatch a share of their tokens and gather the outputs, or dispatch nothing and add up outputs.
    """
    fewest = min(MODES, key=lambda mode: expected_bytes(mode, shape))
    if num_same_tokens != shape.num_ranks or num_same_tokens == 1:
        return fewest
    gathered = (shape.num_ranks - 1) * shape.row_bytes
    of_shares = (expected_bytes(fewest, shape) + gathered) / num_same_tokens
    return "replicated" if expected_bytes("replicated", shape) <= of_shares else fewest
