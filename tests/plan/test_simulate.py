"""Runs step by step: against hand-made small cases, the planner's own costs, and replays of the shipped traces."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_hybrid.dispatch.modes import Mode
from ds_hybrid.errors import ConfigError, PlacementError, TopologyError
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.dispatch_run import Demands, DispatchRun, dispatch_run
from ds_hybrid.plan.machine import Machine, read_machine
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.popularity import Popularity, read_popularity
from ds_hybrid.plan.routing import read_routing
from ds_hybrid.plan.sequence import Gathers
from ds_hybrid.plan.simulate import Outcome, Setting, simulate
from ds_hybrid.plan.time import dispatch_cost, rings, step_time
from ds_hybrid.plan.windows import RebalancePolicy
from ds_hybrid.rebalance.policy import propose
from ds_hybrid.topology.layout import consecutive_groups, plan_layout
from tests.rebalance.traces import FOLDER

A100 = read_machine("a100x8_ib200")
QWEN = read_model("qwen3_30b_a3b")
WORK = Workload(4096)
STATIC = RebalancePolicy("static")
EVEN = Popularity("even", np.ones((3, 48, 128)), 8)


def setting(num_ranks: int = 16, *, machine: Machine = A100, **changes: Any) -> Setting:
    return Setting(QWEN, WORK, machine, machine.cluster(num_ranks), **changes)


def play(popularity: Popularity, mode: Mode, ep_size: int, where: Setting, policy: RebalancePolicy = STATIC) -> Outcome:
    (outcome,) = simulate(where, popularity, modes=[mode], ep_sizes=[ep_size], policies=[policy])
    return outcome


@pytest.mark.parametrize(
    ("mode", "tp_size", "ep_size"),
    [("alltoall", 1, 8), ("allgather", 1, 16), ("two_stage", 2, 8), ("hierarchical", 1, 16), ("replicated", 4, 4)],
)
def test_even_routing_is_the_planners_step(mode: Mode, tp_size: int, ep_size: int) -> None:
    """Every step takes what ``plan.time`` says, and a little more where the draw of tokens is uneven."""
    cluster = A100.cluster(16)
    groups = consecutive_groups(16, ep_size)
    layout = plan_layout(cluster, world_size=16, tp_size=tp_size, ep_size=ep_size, expert_groups=groups)
    demand = read_routing("uniform", QWEN).demand(ep_size, 2 if mode == "hierarchical" else 1)
    candidate = Candidate(16, tp_size, ep_size, 1, mode)
    cost = dispatch_cost(QWEN, WORK, candidate, demand, A100, cluster, layout.ep_groups[0])
    planned = step_time(QWEN, WORK, candidate, demand, A100, rings(A100, cluster, layout), cost, Gathers())
    outcome = play(EVEN, mode, ep_size, setting(tp_size=tp_size))
    assert outcome.dispatch_seconds == pytest.approx(np.full(3, planned.dispatch), rel=1e-9)
    assert outcome.wire_bytes == pytest.approx(np.full(3, 48 * cost.wire_bytes * 16 / ep_size), rel=1e-9)
    assert outcome.expert_seconds == pytest.approx(outcome.imbalance * planned.experts, rel=1e-9)
    assert ((outcome.imbalance > 1) & (outcome.imbalance < 1.03)).all()
    above = (outcome.imbalance - 1) * planned.experts
    assert outcome.step_seconds == pytest.approx(planned.total + above, rel=1e-9)


def test_what_is_asked_for_twice_costs_what_it_costs_once() -> None:
    outcomes = simulate(setting(), EVEN, modes=["two_stage"] * 2, ep_sizes=[8, 8], policies=[STATIC] * 2)
    assert len(outcomes) == 8
    once = play(EVEN, "two_stage", 8, setting())
    for outcome in outcomes:
        assert (outcome.wire_bytes == once.wire_bytes).all()
        assert (outcome.step_seconds == once.step_seconds).all()


FP8_ROW = 132 / 256
"""Of a row in bf16: a byte a value, and a scale of 4 bytes for 128 of them."""


@pytest.mark.parametrize(
    ("mode", "tp_size", "again"),
    [("alltoall", 1, (1 + FP8_ROW) / (3 + FP8_ROW)), ("replicated", 4, 0.5)],
)
def test_layers_that_are_computed_again_dispatch_forward_again(mode: Mode, tp_size: int, again: float) -> None:
    """In fp8 forward moves 1.52 rows of bf16 and backward 2, so it is less than half."""
    once, twice = (
        play(EVEN, mode, 4, setting(tp_size=tp_size, wire_dtype="fp8_e4m3", checkpoints=checkpoints))
        for checkpoints in (False, True)
    )
    factor = 1 + again
    assert twice.wire_bytes == pytest.approx(factor * once.wire_bytes, rel=3e-3)
    assert twice.dispatch_seconds == pytest.approx(factor * once.dispatch_seconds, rel=2e-2)


def test_a_skew_of_three_to_one_by_hand() -> None:
    """The first half of the experts gets three quarters of the pairs, so with EP 2 its rank has 1.5 of the mean."""
    weights = np.ones((2, 48, 128))
    weights[1, :, :64] = 3
    outcome = play(Popularity("skew", weights, 8), "alltoall", 2, setting(4))
    assert outcome.imbalance == pytest.approx([1.0, 1.5], abs=0.01)
    row = 4 * 2048 * 2  # dispatch, combine and their gradients, bf16
    header = 8 * (128 // 2 + 7)
    # Two groups of two ranks; half of the 8 pairs of each token leave, whichever half of the experts they are for.
    expected = 48 * 2 * (2 * header + 4096 * 8 * row)
    assert outcome.wire_bytes == pytest.approx([expected] * 2)
    busiest = 4096 * 8 * np.array([0.5, 0.75]) * row
    seconds = 48 * (5 * A100.inside.latency + (header + busiest) / A100.inside.bandwidth)
    assert outcome.dispatch_seconds == pytest.approx(seconds)


def test_the_draw_of_tokens_is_that_of_tokens() -> None:
    """The busiest of 64 groups, against multinomial draws of as many pairs."""
    popularity = Popularity("even", np.ones((40, 1, 128)), 8)
    where = setting(256)
    outcome = play(popularity, "alltoall", 4, replace(where, work=Workload(64)))
    drawn = np.random.default_rng(1).multinomial(4 * 64 * 8, np.full(4, 0.25), size=(40, 64)).max((1, 2)) / 512
    assert outcome.imbalance.mean() == pytest.approx(drawn.mean(), rel=0.02)


@pytest.mark.parametrize("mode", ["alltoall", "allgather", "two_stage", "hierarchical"])
def test_more_bandwidth_is_never_slower(mode: Mode) -> None:
    run = read_popularity("zipf:1.0,drift=0.05", QWEN, num_steps=5)
    slower = np.full(5, np.inf)
    for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
        machine = replace(
            A100,
            inside=replace(A100.inside, bandwidth=factor * A100.inside.bandwidth),
            across=replace(A100.across, bandwidth=factor * A100.across.bandwidth),
        )
        outcome = play(run, mode, 16, setting(machine=machine))
        assert (outcome.step_seconds < slower).all()
        slower = outcome.step_seconds


def test_more_groups_wait_for_a_slower_one() -> None:
    waits = [play(EVEN, "two_stage", 8, setting(size)).imbalance.mean() for size in (8, 64, 1024)]
    assert waits == sorted(waits)


def test_rebalancing_pays_for_its_moves_and_gains() -> None:
    """A popularity that stays: one move of experts, then even ranks. The trace's bound is 1.13 at EP 8."""
    run = read_popularity(str(FOLDER / "synth_stationary.npz"), QWEN, num_steps=400, top_k=4)
    stays, moves = (
        play(run, "two_stage", 8, setting(), RebalancePolicy(algorithm)) for algorithm in ("static", "swap")
    )
    assert stays.num_moves == 0
    assert (stays.moving_seconds == 0).all()
    assert moves.imbalance[:50] == pytest.approx(stays.imbalance[:50])
    assert moves.imbalance[50:].mean() < stays.imbalance[50:].mean() - 0.15
    begins = np.flatnonzero(moves.moving_seconds)
    assert set(begins) <= set(range(50, 400, 50))
    assert moves.num_moves % 12 == 0  # 48 layers play 4
    # Two groups; 2 bytes of weight and half of 12 bytes of optimizer state for each parameter.
    assert moves.moved_bytes == pytest.approx(moves.num_moves * 2 * 3 * 2048 * 768 * (2 + 6))
    total = moves.rest.total + moves.expert_seconds + moves.dispatch_seconds + moves.moving_seconds
    assert moves.step_seconds == pytest.approx(total)


def test_events_take_their_time_and_must_be_worth_it() -> None:
    run = read_popularity(str(FOLDER / "e32k2_auxoff300.npz"), QWEN, num_steps=800, top_k=2)
    free, dear, too_dear = (
        play(run, "two_stage", 8, setting(event_seconds=seconds), RebalancePolicy("swap")) for seconds in (0, 0.5, 1e6)
    )
    first = np.flatnonzero(free.moving_seconds)[0]
    assert dear.moving_seconds[first] == pytest.approx(free.moving_seconds[first] + 0.5)
    # What the first one takes is not known before; after it, no later one is worth it.
    assert np.count_nonzero(too_dear.moving_seconds) == 1 < np.count_nonzero(free.moving_seconds)


@pytest.mark.parametrize(
    ("stage", "value_bytes", "expected"),
    [(0, 2, 2 + 12), (0, 4, 4 + 8), (1, 2, 2 + 12 / 2), (1, 4, 4 + 12 / 2), (3, 2, 2 / 2 + 12 / 2)],
)
def test_bytes_of_an_expert_that_moves(stage: int, value_bytes: int, expected: float) -> None:
    """Of one parameter in each of two groups: the weight, Adam's moments, and the master where there is one."""
    run = read_popularity(str(FOLDER / "synth_stationary.npz"), QWEN, num_steps=101, top_k=4)
    where = replace(setting(zero_stage=stage), work=Workload(4096, value_bytes=value_bytes))
    moves = play(run, "two_stage", 8, where, RebalancePolicy("swap"))
    assert moves.num_moves > 0
    assert moves.moved_bytes == pytest.approx(moves.num_moves * 2 * 3 * 2048 * 768 * expected)


@pytest.mark.parametrize(("ep_size", "algorithm"), [(64, "static"), (8, "swap")])
def test_size(ep_size: int, algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of 1,000 steps x 60 layers x 256 experts x 4096 ranks, for 4 GiB; work that is done 50 steps at a time.

    docs/article.md says how long all of it takes.
    """
    model = replace(read_model("deepseek_v3"), num_layers=3 + 15)
    machine = read_machine("h100x8_ib400")
    where = Setting(model, WORK, machine, machine.cluster(4096))
    work = Counter[tuple[str, tuple[int, ...]]]()

    def counted(mode: Mode, demands: Demands, *rest: Any) -> DispatchRun:
        work[mode, demands.pairs.shape] += 1
        return dispatch_run(mode, demands, *rest)

    def proposed(*arguments: Any, **options: Any) -> Any:
        work["propose", ()] += 1
        return propose(*arguments, **options)

    monkeypatch.setattr("ds_hybrid.plan.simulate.dispatch_run", counted)
    monkeypatch.setattr("ds_hybrid.plan.windows.propose", proposed)
    tracemalloc.start()
    run = read_popularity("zipf:1.0,drift=0.01", model, num_steps=100)
    simulate(where, run, modes=["two_stage", "alltoall"], ep_sizes=[ep_size], policies=[RebalancePolicy(algorithm)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A run holds its weights once, and draws of 50 steps; neither grows with more steps but for the weights.
    assert peak + 40 * run.weights.nbytes < 2 * 2**30
    proposals = {} if algorithm == "static" else {("propose", ()): 15}
    assert work == {(mode, (50, ep_size)): 15 * 2 for mode in ("two_stage", "alltoall")} | proposals


@pytest.mark.parametrize(
    ("mode", "ep_size", "message"),
    [
        ("replicated", 8, "--dispatch replicated with EP 8, TP 1: expert groups must be the tensor-parallel groups. "),
        ("hierarchical", 8, "--dispatch hierarchical with EP 8, TP 1: a group must span several hosts of 8 ranks, "),
    ],
)
def test_dispatchers_that_cannot_serve(mode: Mode, ep_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        play(EVEN, mode, ep_size, setting())


def test_sizes_that_do_not_divide() -> None:
    with pytest.raises(PlacementError, match="128 experts cannot be spread evenly over 5 ranks"):
        play(EVEN, "alltoall", 5, setting())
    with pytest.raises(TopologyError):
        play(EVEN, "alltoall", 32, setting(16))


def test_the_rest_has_neither_experts_nor_dispatch() -> None:
    rest = play(EVEN, "two_stage", 8, setting()).rest
    assert (rest.experts, rest.dispatch) == (0.0, 0.0)
    assert rest.dense > 0
