"""Which dispatcher a layer uses."""

from __future__ import annotations

from ds_hybrid.dispatch.allgather import AllGatherDispatcher
from ds_hybrid.dispatch.alltoall import AllToAllDispatcher
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.modes import MODES, Mode
from ds_hybrid.dispatch.traffic import WireShape, expected_bytes
from ds_hybrid.dispatch.two_stage import TwoStageDispatcher

_DISPATCHERS: dict[Mode, type[Dispatcher]] = {
    dispatcher.mode: dispatcher for dispatcher in (AllToAllDispatcher, AllGatherDispatcher, TwoStageDispatcher)
}


def make_dispatcher(mode: Mode, group: RankGroup, *, layer: str, guard: bool) -> Dispatcher:
    """The dispatcher of that name over ``group``."""
    return _DISPATCHERS[mode](group, layer=layer, guard=guard)


def choose_mode(shape: WireShape) -> Mode:
    """The mode that sends the fewest bytes under uniform routing; the simplest one where they tie."""
    return min(MODES, key=lambda mode: expected_bytes(mode, shape))
