"""``auto``: layers change their dispatcher between steps, all ranks alike, and training goes on unchanged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch.distributed as dist

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.measure import measure_link
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.predict import GroupSpeed
from ds_hybrid.engine import auto_dispatch
from ds_hybrid.topology import probe
from tests.multirank.test_presets import LOSS_TOLERANCE, PARAMETER_TOLERANCE
from tests.multirank.training import (
    Run,
    initial_parameters,
    largest_difference,
    train_hybrid,
    train_plain,
    worst_parameter,
)
from tests.ranks import RankPool

RUN = Run(mode="auto", ep_size=4, num_steps=5)
WAITING = GroupSpeed(latency=1.0, bandwidth=1e12)
"""Every message costs a second and its bytes nothing, so the mode with the fewest messages wins."""


@dataclass(frozen=True)
class Watched:
    """A training in mode ``auto``: each layer's mode after every step, what it says, and its error."""

    modes: list[list[str]]
    predicted: list[dict[str, float]]
    lines: list[str]
    loss_error: float
    parameter_error: float


def test_the_mode_changes_after_the_first_step_and_nothing_else(four_ranks: RankPool) -> None:
    results = four_ranks.run(watch, RUN, {4: WAITING})
    for result in results:
        assert result.modes == [["alltoall", "alltoall"]] * 5
        assert result.loss_error <= LOSS_TOLERANCE
        assert result.parameter_error <= PARAMETER_TOLERANCE
        # messages of a forward and backward: one header and four exchanges; ids besides; weights besides
        assert result.predicted == [{"alltoall": 5.0, "allgather": 8.0, "two_stage": 6.0}] * 2
    assert [result.lines for result in results] == 4 * [
        [
            f"ds_hybrid: model.layers.{layer}.mlp: dispatcher two_stage -> alltoall; predicted ms of a forward and "
            "backward: alltoall 5000.000, allgather 8000.000, two_stage 6000.000"
            for layer in range(2)
        ]
    ]


def test_ranks_that_measured_otherwise_decide_alike(four_ranks: RankPool) -> None:
    """Rank 3 alone found the latency; the slowest counts."""
    results = four_ranks.run(watch, RUN, {4: WAITING}, 3)
    assert [result.modes for result in results] == [[["alltoall", "alltoall"]] * 5] * 4
    assert all(result.loss_error <= LOSS_TOLERANCE for result in results)


def test_less_than_a_tenth_changes_nothing(four_ranks: RankPool) -> None:
    """Bytes decide, and the mode that was chosen by bytes stays."""
    results = four_ranks.run(watch, RUN, {4: GroupSpeed(latency=0.0, bandwidth=1e6)})
    assert [result.modes for result in results] == [[["two_stage", "two_stage"]] * 5] * 4
    assert [result.lines for result in results] == [[]] * 4


def test_slow_links_between_nodes_lead_to_hierarchical(four_ranks: RankPool) -> None:
    """Two nodes of two ranks: groups of four and, within them, pairs; the second pair measured is the one inside."""
    speeds = {"group": GroupSpeed(0.0, 1e3), "across": GroupSpeed(0.0, 1e3), "inside": GroupSpeed(0.0, 1e9)}
    results = four_ranks.run(watch, replace(RUN, model_type="mixtral"), speeds, None, (0, 0, 1, 1))
    for result in results:
        assert result.modes == [["hierarchical", "hierarchical"]] * 5
        assert result.loss_error <= LOSS_TOLERANCE
        assert result.parameter_error <= PARAMETER_TOLERANCE


def test_two_expert_parallel_groups_take_the_same_mode(four_ranks: RankPool) -> None:
    """The ranks of one group alone found the latency."""
    results = four_ranks.run(watch, replace(RUN, ep_size=2), {2: WAITING}, 3)
    assert [result.modes for result in results] == [[["alltoall", "alltoall"]] * 5] * 4
    assert all(result.loss_error <= LOSS_TOLERANCE for result in results)


def test_a_real_link_has_a_latency_and_a_bandwidth(four_ranks: RankPool) -> None:
    for latency, bandwidth in four_ranks.run(measure):
        assert 0 < latency < 10
        assert 1e4 < bandwidth < 1e13


def test_statistics_tell_what_arrived_and_how_long_ranks_waited(four_ranks: RankPool) -> None:
    for stats in four_ranks.run(stats_of, replace(RUN, mode="alltoall")):
        for layer in stats.layers:
            assert sum(layer.arrived) == sum(layer.expert_load)  # one row for each choice
            assert layer.receiver_max_over_mean == max(layer.arrived) * 4 / sum(layer.arrived)
            assert layer.exposed_seconds > 0
        assert stats.wire_bytes_by_mode == {"alltoall": sum(layer.payload + layer.metadata for layer in stats.layers)}
        assert math.isclose(stats.exposed_seconds, sum(layer.exposed_seconds for layer in stats.layers))


def watch(
    run: Run,
    speeds: dict[Any, GroupSpeed],
    slow_rank: int | None = None,
    node_of_rank: tuple[int, ...] = (0, 0, 0, 0),
) -> Watched:
    """Train with these link speeds, by way or by the size of the group; on ``slow_rank`` alone if one is given."""
    modes: list[list[str]] = []
    engines: list[Any] = []

    def speed_of(group: RankGroup) -> GroupSpeed:
        if slow_rank is not None and dist.get_rank() != slow_rank:
            return GroupSpeed(0.0, 1e12)
        if group.size in speeds:
            return speeds[group.size]
        ranks = dist.get_process_group_ranks(group.process_group)
        same_node = len({node_of_rank[rank] for rank in ranks}) == 1
        return speeds["group" if group.size == 4 else "inside" if same_node else "across"]

    def note_modes(engine: Any) -> None:
        engines.append(engine)
        step = engine.step

        def noted() -> None:
            step()
            modes.append([layer.dispatcher.mode for layer in engine.moe_layers_by_name().values()])

        engine.step = noted

    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_dispatch, "measure_link", speed_of)
        patch.setattr(auto_dispatch, "print_dist", lambda line, ranks: lines.append(line))
        patch.setattr(probe, "key_of_this_host", lambda: f"node {node_of_rank[dist.get_rank()]}")
        trained = train_hybrid(run, note_modes)
    reference = train_plain(run, dist.get_world_size())
    error, _ = worst_parameter(trained, reference, initial_parameters(run))
    predicted = [dict(layer.switch.predicted) for layer in engines[0].moe_layers_by_name().values()]
    return Watched(modes, predicted, lines, largest_difference(trained.losses, reference.losses), error)


def measure() -> tuple[float, float]:
    speed = measure_link(RankGroup(dist.group.WORLD, Meter()))
    return speed.latency, speed.bandwidth


def stats_of(run: Run) -> Any:
    taken: list[Any] = []

    def take_in_the_end(engine: Any) -> None:
        destroy = engine.destroy

        def taking() -> None:
            taken.append(engine.moe_stats())
            destroy()

        engine.destroy = taking

    train_hybrid(run, take_in_the_end)
    return taken[0]
