"""Seconds and bytes by hand, and against the formulas and the prediction of the dispatchers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ds_hybrid.dispatch.modes import MODES, NUM_FACTS, Mode
from ds_hybrid.dispatch.predict import DemandTable, GroupSpeed, predicted_seconds
from ds_hybrid.dispatch.traffic import WireShape, backward_traffic, expected_bytes, forward_traffic
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.machine import Machine, read_machine
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.routing import read_routing
from ds_hybrid.plan.sequence import gathers
from ds_hybrid.plan.time import DispatchCost, StepTime, dispatch_cost, group_links, rings, step_time
from ds_hybrid.topology.hostfile import parse_hostfile
from ds_hybrid.topology.layout import consecutive_groups, plan_layout

QWEN = read_model("qwen3_30b_a3b")
A100 = read_machine("a100x8_ib200")
WORK = Workload(4096)
BASE = Candidate(16, 1, 8, 1, "two_stage")
PLAIN = Machine("plain", 8, "HOST", 1e12, 1e12, 1e12, 1e12, GroupSpeed(0.0, 1e9), GroupSpeed(0.0, 1e8), 1.0)


def layer_cost(
    mode: Mode, ep_size: int, *, routing: str = "uniform", machine: Machine = A100, tp_size: int = 1
) -> DispatchCost:
    cluster = machine.cluster(16)
    candidate = Candidate(16, tp_size, ep_size, 1, mode)
    group = plan_layout(cluster, world_size=16, tp_size=tp_size, ep_size=ep_size).ep_groups[0]
    num_nodes = 2 if ep_size == 16 else 1
    demand = read_routing(routing, QWEN).demand(ep_size, num_nodes)
    return dispatch_cost(QWEN, WORK, candidate, demand, machine, cluster, group)


def time_of(candidate: Candidate, machine: Machine = A100, work: Workload = WORK, routing: str = "uniform") -> StepTime:
    cluster = machine.cluster(candidate.world_size)
    layout = plan_layout(cluster, world_size=candidate.world_size, tp_size=candidate.tp_size, ep_size=candidate.ep_size)
    demand = read_routing(routing, QWEN).demand(candidate.ep_size)
    cost = dispatch_cost(QWEN, work, candidate, demand, machine, cluster, layout.ep_groups[0])
    speeds = rings(machine, cluster, layout, candidate.sp_size)
    gathered = gathers(QWEN, work, candidate, machine, speeds.sp)
    return step_time(QWEN, work, candidate, demand, machine, speeds, cost, gathered)


@pytest.mark.parametrize("mode", MODES)
def test_bytes_of_a_layer_are_those_of_the_formulas(mode: Mode) -> None:
    """A forward by ``expected_bytes`` and a backward without ids, plus the headers that do not grow with tokens."""
    shape = WireShape(8, 128, 8, 2048, 2)
    both_ways = 2 * expected_bytes(mode, shape) - (0 if mode == "alltoall" else 7 * shape.ids_bytes)
    header = 8 * 7 * (16 + NUM_FACTS if mode == "alltoall" else 1 + NUM_FACTS)
    assert layer_cost(mode, 8).wire_bytes == pytest.approx(8 * (4096 * both_ways + header))


@pytest.mark.parametrize("mode", [*MODES, "hierarchical"])
def test_bytes_under_skew_are_those_of_drawn_tokens(mode: Mode) -> None:
    """Tokens drawn by the same law and followed to the byte, over several orders of the experts."""
    rng = np.random.default_rng(0)
    prior = -np.log(np.arange(1, 129))
    shape = WireShape(16, 128, 8, 2048, 2)
    nodes = (0,) * 8 + (1,) * 8
    sent, bound = [], []
    for _ in range(6):
        order = rng.permutation(128)
        ranks = [order[np.argsort(-(prior + rng.gumbel(size=(128, 128))), axis=1)[:, :8]] // 8 for _ in range(16)]
        parts = [count(mode, ranks, shape, node_of_rank=nodes) for count in (forward_traffic, backward_traffic)]
        sent.append(sum(int((part.payload + part.metadata).sum()) for part in parts))
        bound.append(sum(int(part.lower_bound.sum()) for part in parts))
    cost = layer_cost(mode, 16, routing="zipf:1.0")
    tokens = 128 / 4096
    assert cost.wire_bytes * tokens == pytest.approx(np.mean(sent), rel=0.05)
    assert cost.lower_bound * tokens == pytest.approx(np.mean(bound), rel=0.05)


@pytest.mark.parametrize("mode", [*MODES, "hierarchical"])
def test_seconds_of_a_layer_are_those_by_which_auto_chooses(mode: Mode) -> None:
    demand = read_routing("zipf:1.0", QWEN).demand(16, 2 if mode == "hierarchical" else 1)
    to_each = np.full((16, 1), 4096.0)
    table = DemandTable(to_each * demand.pairs, to_each * demand.rows, to_each * demand.rows_to_node, to_each[:, 0])
    links = group_links(A100, A100.cluster(16), range(16), mode)
    shape = WireShape(16, 128, 8, 2048, 2)
    seconds = predicted_seconds(mode, table, shape, links, node_of_rank=(0,) * 8 + (1,) * 8)
    cost = dispatch_cost(QWEN, WORK, Candidate(16, 1, 16, 1, mode), demand, A100, A100.cluster(16), range(16))
    assert cost.seconds == pytest.approx(seconds)


def test_two_stage_is_near_the_bound_and_replicated_has_none() -> None:
    ratio = layer_cost("two_stage", 8).ratio
    assert ratio is not None
    assert 1 < ratio < 1.01
    assert layer_cost("replicated", 4, tp_size=4).ratio is None


def test_replicated_is_three_all_reduces_and_a_header() -> None:
    """Outputs, their gradients, and those of the float32 routing weights, in rings of four; bytes as counted."""
    cost = layer_cost("replicated", 4, machine=PLAIN, tp_size=4)
    num_bytes = 4096 * (2 * 2048 * 2 + 8 * 4)
    assert cost.seconds == pytest.approx(2 * 3 / 4 * num_bytes / 1e9, rel=1e-5)
    shape = WireShape(4, 128, 8, 2048, 2)
    ranks = [np.zeros((4096, 8), dtype=np.int64)] * 4
    parts = [count("replicated", ranks, shape) for count in (forward_traffic, backward_traffic)]
    assert cost.wire_bytes == sum(int((part.payload + part.metadata).sum()) for part in parts)


def test_compute_by_hand() -> None:
    """Forward once and backward twice (of fused attention two and a half times), and once more with checkpoints, which
    leave the logits alone.
    """
    head = 2.0 * 151936 * 2048
    scores = QWEN.score_flops(4096, causal=True)
    forward = QWEN.whole_flops + QWEN.projection_flops + scores
    once = 3 * forward + scores / 2
    assert time_of(BASE, PLAIN).dense == pytest.approx(4096 * once / 1e12)
    again = once + forward - head
    assert time_of(replace(BASE, checkpoints=True), PLAIN).dense == pytest.approx(4096 * again / 1e12)
    assert time_of(replace(BASE, chunked_loss=True), PLAIN).dense == pytest.approx(4096 * (once + head) / 1e12)
    eager = QWEN.whole_flops + QWEN.projection_flops + QWEN.score_flops(4096, causal=False)
    dense = time_of(BASE, PLAIN, replace(WORK, attention="eager")).dense
    assert dense == pytest.approx(4096 * 3 * eager / 1e12)
    assert time_of(BASE, PLAIN).experts == pytest.approx(4096 * 3 * QWEN.expert_flops / 1e12)


def test_the_busiest_rank_sets_the_pace_of_the_experts() -> None:
    load = read_routing("zipf:1.0", QWEN).demand(8).load
    even, skewed = time_of(BASE), time_of(BASE, routing="zipf:1.0")
    assert skewed.experts / even.experts == pytest.approx(load)
    assert skewed.dispatch > even.dispatch
    assert skewed.dense == even.dense


def test_tensor_parallelism_speeds_up_attention_alone() -> None:
    alone, shared = time_of(BASE, PLAIN).dense, time_of(replace(BASE, tp_size=2), PLAIN).dense
    attention = 4096 * (3 * QWEN.projection_flops + 3.5 * QWEN.score_flops(4096, causal=True)) / 1e12
    assert alone - shared == pytest.approx(attention / 2)
    assert time_of(BASE).tensor_parallel == 0
    # Each layer: an all-reduce after attention, and backward in float32 one before it and of the norms of queries and
    # keys; two gathers of tokens, one of weights. In the end the gradients of all that is whole, in float32.
    num_bytes = 48 * (4096 * (2 * 2048 * 2 + 2 * 2048 * 4 + 2 * 2048 * 2 + 8 * 4) + 2 * 2 * 128 * 4)
    num_bytes += 2 * 4 * QWEN.num_whole_parameters
    assert time_of(replace(BASE, tp_size=2), PLAIN).tensor_parallel == pytest.approx(num_bytes / 2 / 1e9)


def test_reductions_and_gathers_by_stage() -> None:
    """Dense parts over 16 ranks, eight of a host in a ring; experts over two, one on each host."""
    slow = replace(PLAIN, matmul_flops=1e30, expert_flops=1e30, memory_bytes_per_second=1e30)
    dense, experts = 2 * QWEN.num_dense_parameters * 15 / 16 / 8e8, 2 * QWEN.num_expert_parameters / 8 / 2 / 1e8
    once = dense + experts
    stages = [time_of(replace(BASE, zero_stage=stage), slow) for stage in range(4)]
    assert [t.reduction for t in stages] == pytest.approx([2 * once, 2 * once, 2 * once, once])
    assert [t.gathers for t in stages] == pytest.approx([0, once, once, 2 * once])


def test_zero_3_hides_what_compute_covers() -> None:
    stage_3 = replace(BASE, zero_stage=3)
    quick = replace(PLAIN, matmul_flops=1e30, expert_flops=1e30, memory_bytes_per_second=1e30)
    slow = replace(PLAIN, matmul_flops=1e9)
    exposed, hidden = time_of(stage_3, quick), time_of(stage_3, slow)
    assert exposed.hidden == pytest.approx(0, abs=1e-9)
    assert hidden.reduction == hidden.gathers == pytest.approx(0, abs=1e-9)
    assert hidden.hidden == pytest.approx(exposed.reduction + exposed.gathers)
    assert time_of(stage_3, replace(slow, overlap=0.0)).reduction == pytest.approx(exposed.reduction)


def test_a_step_of_several_micro_batches_adds_up_and_updates_once() -> None:
    once, thrice = time_of(BASE), time_of(replace(BASE, micro_batches=3))
    parts = ("dense", "experts", "memory_bound", "dispatch")
    assert [getattr(thrice, part) for part in parts] == pytest.approx([3 * getattr(once, part) for part in parts])
    assert (thrice.reduction, thrice.gathers, thrice.optimizer) == (once.reduction, once.gathers, once.optimizer)
    by_stage = [time_of(replace(BASE, zero_stage=stage, micro_batches=3)).reduction for stage in (2, 3)]
    assert by_stage[0] == pytest.approx(3 * time_of(replace(BASE, zero_stage=2)).reduction)


def test_adam_by_hand() -> None:
    """Gradient read, moments and master read and written in float32; the 16-bit weight written."""
    slow = replace(PLAIN, memory_bytes_per_second=1e9)
    float32 = replace(WORK, value_bytes=4)
    owned = QWEN.num_dense_parameters / 16 + QWEN.num_expert_parameters / 16
    whole = QWEN.num_dense_parameters + QWEN.num_expert_parameters / 8
    assert time_of(BASE, slow).optimizer == pytest.approx(30 * owned / 1e9)
    assert time_of(BASE, slow, float32).optimizer == pytest.approx(32 * owned / 1e9)
    assert time_of(replace(BASE, zero_stage=0), slow, float32).optimizer == pytest.approx(28 * whole / 1e9)


def test_the_slowest_group_sets_the_pace() -> None:
    """Ranks 2 and 3 of hosts of 3 and 5 ranks lie on two hosts, ranks 0 and 1 on one."""
    cluster = A100.cluster_of(parse_hostfile("a slots=3\nb slots=5\n", name="hosts"))
    layout = plan_layout(cluster, world_size=8, tp_size=2, ep_size=2, expert_groups=consecutive_groups(8, 2))
    assert layout.tp_groups[0] == (0, 1)
    assert rings(A100, cluster, layout).tp == A100.ring((2, 3), cluster) != A100.ring((0, 1), cluster)


def test_what_is_hidden_is_no_part_of_the_step() -> None:
    assert StepTime(1, 2, 3, 4, 5, 6, 7, 8, hidden=100).total == 36


def test_a_faster_network_helps_groups_over_hosts() -> None:
    faster = replace(A100, across=GroupSpeed(A100.across.latency, 2 * A100.across.bandwidth))
    assert layer_cost("two_stage", 16, machine=faster).seconds < 0.6 * layer_cost("two_stage", 16).seconds
    assert layer_cost("two_stage", 8, machine=faster).seconds == layer_cost("two_stage", 8).seconds
