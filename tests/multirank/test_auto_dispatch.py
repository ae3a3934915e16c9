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
from tests.multirank import explicit
from tests.multirank.explicit import Setup
from tests.multirank.test_presets import LOSS_TOLERANCE, PARAMETER_TOLERANCE
from tests.multirank.training import (
    Run,
    batch,
    initial_parameters,
    largest_difference,
    make_engine,
    train_hybrid,
    train_plain,
    worst_parameter,
)
from tests.ranks import RankPool

RUN = Run(mode="auto", ep_size=4, num_steps=5)
EXPLICIT = Setup(k=3, accumulation=2, dispatch={"mode": "auto"})
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


RECOMPUTATION = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non_reentrant"])


@RECOMPUTATION
def test_recomputed_in_two_micro_batches(four_ranks: RankPool, use_reentrant: bool) -> None:
    """The first step, not its first micro-batch, ends with a choice."""
    run = replace(RUN, checkpointing=use_reentrant, accumulation=2, num_steps=3)
    for result in four_ranks.run(watch, run, {4: WAITING}):
        assert result.modes == [["two_stage"] * 2] + [["alltoall"] * 2] * 5
        assert result.loss_error <= LOSS_TOLERANCE
        assert result.parameter_error <= PARAMETER_TOLERANCE


@RECOMPUTATION
def test_recomputation_asks_for_nothing_twice(four_ranks: RankPool, use_reentrant: bool) -> None:
    run = replace(RUN, accumulation=2)
    plain, recomputed = (four_ranks.run(demands_of, r) for r in (run, replace(run, checkpointing=use_reentrant)))
    assert recomputed == plain
    assert_two_calls(plain, num_layers=2, num_tokens=2 * 2 * 12, top_k=3)


@pytest.mark.parametrize("checkpointing", [True, False, "deepspeed"])
def test_recomputation_of_an_explicit_layer_asks_for_nothing_twice(four_ranks: RankPool, checkpointing: Any) -> None:
    setup = replace(EXPLICIT, ep_size=4)
    plain, recomputed = (
        four_ranks.run(demands_of_explicit, s) for s in (setup, replace(setup, checkpointing=checkpointing))
    )
    assert recomputed == plain
    assert_two_calls(plain, num_layers=1, num_tokens=2 * 6, top_k=3)


@pytest.mark.parametrize("checkpointing", [None, True, False, "deepspeed"])
def test_an_explicit_layer_changes_too(four_ranks: RankPool, checkpointing: Any) -> None:
    """Two expert-parallel groups of two ranks; before anything is measured, allgather sends the fewest bytes."""
    setup = replace(EXPLICIT, checkpointing=checkpointing)
    for result in four_ranks.run(watch_explicit, setup):
        assert result.modes == [["allgather"], *[["alltoall"]] * 5]
        assert result.predicted == [{"alltoall": 5.0, "allgather": 8.0, "two_stage": 6.0}]
        assert result.lines == [
            "ds_hybrid: moe: dispatcher allgather -> alltoall; predicted ms of a forward and backward: "
            "alltoall 5000.000, allgather 8000.000, two_stage 6000.000"
        ]
        assert result.parameter_error <= 1e-5


def test_ranks_that_measure_for_themselves_decide_alike(four_ranks: RankPool) -> None:
    """Past the second choice, after step 21; each group of ranks measures its link once."""
    results = four_ranks.run(decide_by_real_links, replace(RUN, num_steps=22))
    assert [result.num_measured for result in results] == [1] * 4
    for result in results:
        assert [sorted(seconds) for seconds in result.predicted] == [["allgather", "alltoall", "two_stage"]] * 2 * 2
        assert all(0 < value < 60 for seconds in result.predicted for value in seconds.values())
        assert (result.predicted, result.modes) == (results[0].predicted, results[0].modes)
        assert result.losses == results[0].losses
        assert all(map(math.isfinite, result.losses))


def test_bytes_of_a_change_go_to_both_modes(four_ranks: RankPool) -> None:
    """Two steps between two readings: the first one in the one mode, the second one in the other."""
    for both, first in zip(
        four_ranks.run(stats_of_change, replace(RUN, num_steps=2)),
        four_ranks.run(stats_of, replace(RUN, mode="two_stage", num_steps=1)),
        strict=True,
    ):
        for layer, alone in zip(both.layers, first.layers, strict=True):
            assert layer.mode == "alltoall"
            assert set(layer.wire_bytes_by_mode) == {"two_stage", "alltoall"}
            assert sum(layer.wire_bytes_by_mode.values()) == layer.payload + layer.metadata
            assert layer.wire_bytes_by_mode["two_stage"] == alone.payload + alone.metadata
        total = sum(layer.payload + layer.metadata for layer in both.layers)
        assert sum(both.wire_bytes_by_mode.values()) == total


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


def watch_explicit(setup: Setup) -> Watched:
    """Train a model with one explicit layer over links on which every message costs a second."""
    modes: list[list[str]] = []
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_dispatch, "measure_link", lambda group: WAITING)
        patch.setattr(auto_dispatch, "print_dist", lambda line, ranks: lines.append(line))
        toy = explicit.Toy(setup)
        engine = explicit.make_engine(setup, toy)
        step = engine.step

        def noted() -> None:
            step()
            modes.append([toy.moe.dispatcher.mode])

        engine.step = noted
        trained = explicit.train(engine, setup)
    reference = explicit.train_reference(setup, dist.get_world_size())
    error = explicit.worst_error(trained, reference, explicit.initial_parameters(setup))
    return Watched(modes, [dict(toy.moe.switch.predicted)], lines, 0.0, error)


def assert_two_calls(demands: list[list[list[int]]], *, num_layers: int, num_tokens: int, top_k: int) -> None:
    """The sums that any routing has: every choice on some rank, each token once to at most min(K, P) of the 4."""
    for of_layers in demands:
        assert len(of_layers) == num_layers
        for counts in of_layers:
            pairs, rows, (tokens, calls) = counts[:4], counts[4:8], counts[8:]
            assert (tokens, calls) == (num_tokens, 2)
            assert sum(pairs) == top_k * num_tokens
            assert num_tokens <= sum(rows) <= sum(pairs)


def demands_of(run: Run) -> list[list[int]]:
    """What each layer's calls in two micro-batches asked for, before the step takes it."""
    engine = make_engine(run)
    for micro in range(2):
        ids = batch(0, dist.get_rank(), micro)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        if micro == 0:
            engine.step()
    demands = [layer.switch.take_demand().tolist() for layer in engine.moe_layers_by_name().values()]
    engine.destroy()
    return demands


def demands_of_explicit(setup: Setup) -> list[list[int]]:
    toy = explicit.Toy(setup)
    engine = explicit.make_engine(setup, toy)
    for micro in range(2):
        engine.backward(explicit.loss_of(setup, engine(explicit.batch(setup, 0, dist.get_rank(), micro))))
        if micro == 0:
            engine.step()
    demand = toy.moe.switch.take_demand().tolist()
    engine.destroy()
    return [demand]


@dataclass(frozen=True)
class Decided:
    """A training over measured links: predictions of both choices for each layer, modes after each step, losses."""

    predicted: list[dict[str, float]]
    modes: list[list[str]]
    losses: list[float]
    num_measured: int


def decide_by_real_links(run: Run) -> Decided:
    predicted: list[dict[str, float]] = []
    modes: list[list[str]] = []
    measured: list[GroupSpeed] = []

    def measure_and_note(group: RankGroup) -> GroupSpeed:
        measured.append(measure_link(group))
        return measured[-1]

    def note(engine: Any) -> None:
        layers = list(engine.moe_layers_by_name().values())
        step, choose = engine.step, engine._auto_dispatch.choose

        def noted_choice() -> None:
            choose()
            predicted.extend(dict(layer.switch.predicted) for layer in layers)

        def noted_step() -> None:
            step()
            modes.append([layer.dispatcher.mode for layer in layers])

        engine.step, engine._auto_dispatch.choose = noted_step, noted_choice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_dispatch, "measure_link", measure_and_note)
        trained = train_hybrid(run, note)
    return Decided(predicted, modes, trained.losses, len(measured))


def measure() -> tuple[float, float]:
    speed = measure_link(RankGroup(dist.group.WORLD, Meter()))
    return speed.latency, speed.bandwidth


def stats_of_change(run: Run) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_dispatch, "measure_link", lambda group: WAITING)
        return stats_of(run)


def stats_of(run: Run) -> Any:
    taken: list[Any] = []

    def take_in_the_end(engine: Any) -> None:
        destroy = engine.destroy

        def taking() -> None:
            engine.destroy = destroy  # the garbage collector calls it again, and not on all ranks at once
            taken.append(engine.moe_stats())
            destroy()

        engine.destroy = taking

    train_hybrid(run, take_in_the_end)
    return taken[0]
