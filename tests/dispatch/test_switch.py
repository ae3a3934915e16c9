"""Which dispatchers a layer may take, what it does where its group has no nodes, and how it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_hybrid.dispatch.collectives import LoneRank, RankGroup
from ds_hybrid.dispatch.demand import demand_of
from ds_hybrid.dispatch.hierarchical import CutByNodes, NodeGroups
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.modes import ALL_MODES, MODES
from ds_hybrid.dispatch.switch import DispatchSwitch, make_dispatcher
from ds_hybrid.dispatch.traffic import WireShape
from ds_hybrid.errors import ConfigError, DispatchError, TopologyError

SHAPE = WireShape(num_ranks=4, num_experts=16, top_k=4, hidden_size=64, value_bytes=2, wire_dtype="fp8_e4m3")


class Ranks(RankGroup):
    """``size`` ranks, of which this is ``rank``; they exchange nothing here."""

    def __init__(self, size: int = 4, rank: int = 1, meter: Meter | None = None) -> None:
        self.process_group = f"group of {size}"
        self.size, self.rank, self.meter = size, rank, meter or Meter()


@dataclass
class Cutter:
    """Two nodes of two ranks, or what is wrong with them; notes what it was asked to cut."""

    fault: Exception | None = None
    asked: tuple[Any, ...] = ()

    def __call__(self, process_group: Any) -> Any:
        self.asked += (process_group,)
        if self.fault is not None:
            raise self.fault
        return SimpleNamespace(
            with_meter=lambda meter: NodeGroups((0, 0, 1, 1), Ranks(2, 0, meter), Ranks(2, 1, meter))
        )


def switch_of(mode: Any, cutter: CutByNodes | None, group: RankGroup | None = None) -> DispatchSwitch:
    return DispatchSwitch(mode, group or Ranks(), SHAPE, layer="layers.3.mlp", guard=True, cut_by_nodes=cutter)


@pytest.mark.parametrize("mode", MODES)
def test_a_named_mode_is_the_only_one_and_asks_for_no_nodes(mode: Any) -> None:
    cutter = Cutter(ConfigError("one node"))
    switch = switch_of(mode, cutter)
    assert (switch.candidates, switch.dispatcher.mode, switch.group.meter.mode) == ((mode,), mode, mode)
    assert switch.demand is switch.dispatcher.watch is None
    assert cutter.asked == ()


@pytest.mark.parametrize(
    ("cutter", "extra", "ways", "num_counts"),
    [
        (Cutter(), ("hierarchical",), ["group", "across", "inside"], 3 * 4 + 2),
        (Cutter(ConfigError("the group lies on one node.")), (), ["group"], 2 * 4 + 2),
        (Cutter(TopologyError("the hosts are not known.")), (), ["group"], 2 * 4 + 2),
        (Cutter(DispatchError("the nodes hold 3, 1 ranks.")), (), ["group"], 2 * 4 + 2),
        (None, (), ["group"], 2 * 4 + 2),
    ],
    ids=["nodes", "one node", "no topology", "unequal nodes", "no cutter"],
)
def test_auto_does_without_nodes_where_there_are_none(
    cutter: Cutter | None, extra: tuple[str, ...], ways: list[str], num_counts: int
) -> None:
    switch = switch_of("auto", cutter)
    assert switch.candidates == (*MODES, *extra)
    assert switch.dispatcher.mode == switch.group.meter.mode == "two_stage"  # the fewest bytes under uniform routing
    assert switch.dispatcher.node_of_rank == ((0, 0, 1, 1) if extra else ())
    assert list(switch.ways) == ways
    assert {way.meter for way in switch.ways.values()} == {switch.group.meter}
    assert switch.take_demand().tolist() == [0] * num_counts
    assert cutter is None or cutter.asked == ("group of 4",)


@pytest.mark.parametrize("fault", [ConfigError("one node."), DispatchError("3, 1 ranks."), TopologyError("no hosts.")])
def test_hierarchical_raises_what_is_wrong_with_its_nodes(fault: Exception) -> None:
    with pytest.raises(type(fault)) as error:
        switch_of("hierarchical", Cutter(fault))
    assert error.value is fault


def test_a_bug_in_the_cutter_is_no_reason_to_fall_back() -> None:
    with pytest.raises(KeyError):
        switch_of("auto", Cutter(KeyError("a bug")))


@pytest.mark.parametrize(
    "make",
    [
        lambda: switch_of("hierarchical", None),
        lambda: make_dispatcher("hierarchical", Ranks(), layer="layers.3.mlp", guard=True),
        lambda: switch_of("auto", None).use("hierarchical"),
    ],
    ids=["switch", "dispatcher", "use"],
)
def test_hierarchical_needs_nodes(make: Callable[[], Any]) -> None:
    with pytest.raises(DispatchError) as error:
        make()
    assert str(error.value) == (
        'layers.3.mlp: mode "hierarchical" needs its expert-parallel group cut by nodes. Pass the model to '
        "ds_hybrid.initialize, or choose another mode."
    )


@pytest.mark.parametrize("mode", ["auto", "hierarchical"])
def test_a_lone_rank_has_nothing_to_choose(mode: Any) -> None:
    cutter = Cutter(ConfigError("one node"))
    switch = switch_of(mode, cutter, LoneRank(Meter()))
    assert (switch.candidates, switch.dispatcher.mode, switch.demand) == (("allgather",), "allgather", None)
    assert cutter.asked == ()


def test_use_changes_the_dispatcher_its_options_stay_and_the_meter_follows() -> None:
    switch = switch_of("auto", Cutter())
    seen = []
    for mode in ALL_MODES:
        before = switch.dispatcher
        switch.use(mode)
        assert switch.dispatcher is not before
        assert switch.dispatcher.watch is switch.demand is not None
        assert switch.dispatcher.group is switch.group
        options = (switch.dispatcher.layer, switch.dispatcher.guard, switch.dispatcher.wire_dtype)
        assert options == ("layers.3.mlp", True, "fp8_e4m3")
        switch.group.meter.add_payload(1)
        seen.append((switch.dispatcher.mode, switch.group.meter.mode))
    assert seen == [(mode, mode) for mode in ALL_MODES]
    assert switch.group.meter.take().by_mode == dict.fromkeys(ALL_MODES, 1)


def test_demand_outlives_a_change_and_is_taken_once() -> None:
    switch = switch_of("auto", None)
    rank_of_choice = torch.tensor([[0, 1, 1, 3], [1, 2, 0, 0]])
    for mode in ("alltoall", "two_stage"):
        switch.use(mode)
        assert switch.dispatcher.watch is not None
        switch.dispatcher.watch.add(demand_of(rank_of_choice, num_ranks=4), num_tokens=2)
    assert switch.take_demand().tolist() == [6, 6, 2, 2, 4, 4, 2, 2, 4, 2]
    assert switch.take_demand().tolist() == [0] * 10
