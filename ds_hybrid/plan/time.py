"""Seconds of one step of a rank, and what leaves it: compute, and each collective on its link. Pure.

One step is a forward and backward of each micro-batch and the optimizer's step. The rank with the busiest experts sets
the pace of each layer. What hides: with ZeRO 3 DeepSpeed gathers and reduces beside compute, and keys and values of a
sequence that is shared out travel beside attention. Everything else waits, as ``overlap_comm`` is off by default below
stage 3 and dispatch runs in one chunk. A message takes its latency and its bytes over the bandwidth (Hockney's model).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ds_hybrid.dispatch.modes import Mode
from ds_hybrid.dispatch.predict import DemandTable, GroupSpeed, Way, messages, predicted_seconds
from ds_hybrid.dispatch.traffic import INTEGER_BYTES, WireShape
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.machine import Machine
from ds_hybrid.plan.memory import kept_by_layers
from ds_hybrid.plan.model import ModelShape
from ds_hybrid.plan.routing import RankDemand
from ds_hybrid.plan.sequence import Gathers
from ds_hybrid.plan.states import has_master, num_updated
from ds_hybrid.topology.cluster import Cluster
from ds_hybrid.topology.layout import Layout

_FLOAT = 4
_PASSES = 3
"""How often a byte that autograd keeps crosses the memory bus: written, read by the next operation and in backward."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step that one after the other make it up; ``hidden`` is what collectives take beside compute.

    Attributes:
        dense: matrix products and attention of all that is not a routed expert.
        experts: those of the busiest rank's experts.
        memory_bound: norms, activations and copies.
        dispatch: tokens to experts and back.
        tensor_parallel: reductions in sharded attention, and joining what ranks with the same tokens did apart.
        sequence_parallel: keys, values and their gradients that attention waits for.
        reduction: gradients over the copies of weights.
        gathers: weights over the ranks that share them.
        optimizer: the step itself.
        hidden: seconds of collectives that run beside compute. Not part of the sum.
    """

    dense: float
    experts: float
    memory_bound: float
    dispatch: float
    tensor_parallel: float
    reduction: float
    gathers: float
    optimizer: float
    sequence_parallel: float = 0.0
    hidden: float = 0.0

    @property
    def total(self) -> float:
        return sum(seconds for name, seconds in asdict(self).items() if name != "hidden")


@dataclass(frozen=True)
class DispatchCost:
    """One MoE layer, forward and backward: seconds, bytes that leave all ranks of a group, and those that have to."""

    seconds: float
    wire_bytes: float
    lower_bound: float

    @property
    def ratio(self) -> float | None:
        """Bytes over those that have to leave; None where none have to."""
        return self.wire_bytes / self.lower_bound if self.lower_bound else None


@dataclass(frozen=True)
class Rings:
    """What the slowest group of each kind reaches in its rings: a step waits for it.

    Attributes:
        tp, sp: of the ranks that share a micro-batch.
        dp, edp: of the copies of what is dense, and of experts.
    """

    tp: GroupSpeed
    sp: GroupSpeed
    dp: GroupSpeed
    edp: GroupSpeed


def rings(machine: Machine, cluster: Cluster, layout: Layout, sp_size: int = 1) -> Rings:
    """Of a layout; the ranks that share a sequence are consecutive."""

    def slowest(groups: Sequence[Sequence[int]]) -> GroupSpeed:
        return min((machine.ring(group, cluster) for group in groups), key=lambda speed: speed.bandwidth)

    shared = [range(first, first + sp_size) for first in range(0, cluster.num_ranks, sp_size)]
    return Rings(slowest(layout.tp_groups), slowest(shared), slowest(layout.dp_groups), slowest(layout.edp_groups))


def step_time(
    model: ModelShape,
    work: Workload,
    candidate: Candidate,
    demand: RankDemand,
    machine: Machine,
    speeds: Rings,
    dispatched: DispatchCost,
    gathered: Gathers,
) -> StepTime:
    """Of all micro-batches of a step.

    Args:
        speeds: see :func:`rings`.
        dispatched: :func:`dispatch_cost` of one layer and micro-batch.
        gathered: ``plan.sequence.gathers`` of one micro-batch.
    """
    part, count = candidate.part_of(work), candidate.micro_batches
    dense = _dense_flops(model, work, candidate) / machine.matmul_flops
    experts = _expert_flops(model, part, candidate, demand) / machine.expert_flops
    kept = kept_by_layers(model, part, candidate, demand, load=demand.load)
    again = 4 / 3 if candidate.checkpoints else 1.0
    memory_bound = _PASSES * kept * again / machine.memory_bytes_per_second
    reduction, weights = _zero_seconds(model, work, candidate, speeds)
    hidden = count * gathered.hidden
    if candidate.zero_stage == 3:
        beside = min(reduction + weights, machine.overlap * count * (dense + experts + memory_bound))
        hidden_gathers = min(weights, beside)
        weights, reduction = weights - hidden_gathers, reduction - (beside - hidden_gathers)
        hidden += beside
    updated = num_updated(model, candidate) * _optimizer_bytes(candidate, work.value_bytes)
    return StepTime(
        dense=count * dense,
        experts=count * experts,
        memory_bound=count * memory_bound,
        dispatch=candidate.num_dispatches * model.num_moe_layers * dispatched.seconds,
        tensor_parallel=count * _tensor_parallel_seconds(model, work, candidate, speeds.tp),
        sequence_parallel=count * gathered.exposed,
        reduction=reduction,
        gathers=weights,
        optimizer=updated / machine.memory_bytes_per_second,
        hidden=hidden,
    )


def dispatch_cost(
    model: ModelShape,
    work: Workload,
    candidate: Candidate,
    demand: RankDemand,
    machine: Machine,
    cluster: Cluster,
    group: Sequence[int],
) -> DispatchCost:
    """Of one MoE layer in an expert-parallel group; seconds as ``ds_hybrid.dispatch.predict`` would tell them."""
    num_ranks = candidate.ep_size
    num_tokens = candidate.tokens_dispatched(candidate.part_of(work).num_tokens)
    shape = WireShape(num_ranks, model.num_experts, model.top_k, model.hidden_size, work.value_bytes)
    if num_ranks == 1:
        return DispatchCost(0.0, 0.0, 0.0)
    if candidate.mode == "replicated":
        return _replicated_cost(shape, num_tokens, machine.ring(group, cluster))
    node_of_rank = nodes_of(group, cluster)
    to_each = np.full((num_ranks, 1), num_tokens)
    rows = to_each * demand.rows
    table = DemandTable(
        pairs=to_each * demand.pairs,
        rows=rows,
        rows_to_node=to_each * demand.rows_to_node,
        num_tokens=np.full(num_ranks, float(num_tokens)),
    )
    links = group_links(machine, cluster, group, candidate.mode)
    seconds = predicted_seconds(candidate.mode, table, shape, links, node_of_rank=node_of_rank)
    sent = sum(float(m.sent.sum()) for m in messages(candidate.mode, table, shape, node_of_rank=node_of_rank))
    return DispatchCost(seconds, sent, 4 * shape.row_bytes * float(rows.sum() - np.trace(rows)))


def group_links(machine: Machine, cluster: Cluster, group: Sequence[int], mode: Mode) -> Mapping[Way, GroupSpeed]:
    """What the exchanges of a dispatcher reach in a group: all-gathers run in rings, the others directly."""
    whole = machine.ring if mode == "allgather" else machine.all_to_all
    return {"group": whole(group, cluster), "across": machine.across, "inside": machine.inside}


def nodes_of(group: Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    """The node of each rank of a group, counted from 0."""
    hosts = [cluster.host_of_rank[rank] for rank in group]
    order = sorted(set(hosts))
    return tuple(order.index(host) for host in hosts)


def _replicated_cost(shape: WireShape, num_tokens: float, speed: GroupSpeed) -> DispatchCost:
    """A header; all-reduces of the output in forward, of the gradients of tokens and routing weights in backward."""
    sizes = [num_tokens * shape.row_bytes] * 2 + [num_tokens * shape.riding_bytes]
    header = INTEGER_BYTES * (1 + shape.num_facts) * shape.num_ranks
    seconds = _gather(header, shape.num_ranks, speed) + sum(_all_reduce(size, shape.num_ranks, speed) for size in sizes)
    sent = (header + 2 * sum(sizes)) * (shape.num_ranks - 1)
    return DispatchCost(seconds, sent, 0.0)


def _dense_flops(model: ModelShape, work: Workload, candidate: Candidate) -> float:
    """Backward is two forwards; of fused attention two and a half, which computes scores again in its two products."""
    part = candidate.part_of(work)
    is_fused = part.attention == "fused"
    scores = model.score_flops(work.seq_len, causal=is_fused) / candidate.tp_size
    matrices = model.whole_flops + model.projection_flops / candidate.tp_size
    head = 2.0 * model.vocab_size * model.hidden_size
    again = (matrices + scores - head if candidate.checkpoints else 0.0) + (head if candidate.chunked_loss else 0.0)
    return part.num_tokens * (3 * matrices + (3.5 if is_fused else 3) * scores + again)


def _expert_flops(model: ModelShape, work: Workload, candidate: Candidate, demand: RankDemand) -> float:
    """Of the busiest rank. All tokens of an expert-parallel group are shared out over its ranks."""
    num_tokens = work.num_tokens / candidate.tp_size
    return num_tokens * demand.load * model.expert_flops * (4 if candidate.checkpoints else 3)


def _optimizer_bytes(candidate: Candidate, value_bytes: int) -> int:
    """Of an element: Adam reads the gradient, and reads and writes two moments and the master, all in float32.

    The weight is written from the master, or is it.
    """
    return 7 * _FLOAT + (value_bytes if has_master(candidate, value_bytes) else 0)


def _tensor_parallel_seconds(model: ModelShape, work: Workload, candidate: Candidate, speed: GroupSpeed) -> float:
    """All-reduces after sharded attention and, backward, before it; shares of tokens that are joined again.

    What goes backward is added up in float32: the gradient of what enters attention, and those of its parameters that
    every rank has whole (``engine/tensor_parallel.py``).
    """
    size = candidate.tp_size
    if size == 1:
        return 0.0
    attention, b = model.attention, work.value_bytes
    whole = attention.num_whole_matrices(model.hidden_size) + attention.num_norms
    leave = _all_reduce(work.num_tokens * model.hidden_size * b, size, speed)
    enter = _all_reduce(work.num_tokens * model.hidden_size * _FLOAT, size, speed)
    inside = _all_reduce(whole * _FLOAT, size, speed) if whole else 0.0
    attention_seconds = model.num_layers * (leave * (2 if candidate.checkpoints else 1) + enter + inside)
    if candidate.mode == "replicated" or candidate.ep_size == 1:
        return attention_seconds
    join = _gather(work.num_tokens * model.hidden_size * b, size, speed)
    weights = _gather(work.num_tokens * model.top_k * _FLOAT, size, speed)
    shares = model.num_moe_layers * (join * (3 if candidate.checkpoints else 2) + weights)
    return attention_seconds + shares


def _zero_seconds(model: ModelShape, work: Workload, candidate: Candidate, speeds: Rings) -> tuple[float, float]:
    """Gradients added up, and weights gathered. Below stage 3 DeepSpeed adds up by all-reduce and gathers after a step.

    Stages 0 and 1 add up once a step, 2 and 3 with every micro-batch. Source: ``allreduce_and_scatter`` of DeepSpeed
    0.19.8, the default way of its stages 1 and 2.
    """
    b, stage, count = work.value_bytes, candidate.zero_stage, candidate.micro_batches
    dense = b * (model.num_sharded_parameters / candidate.tp_size + model.num_whole_parameters)
    experts = b * model.num_expert_parameters / candidate.ep_size
    reduction = weights = 0.0
    for num_bytes, size, speed in ((dense, candidate.dp_size, speeds.dp), (experts, candidate.edp_size, speeds.edp)):
        if size == 1:
            continue
        if stage == 3:
            # Forward and backward each gather a layer; so does computing it again.
            rounds = 3 if candidate.checkpoints else 2
            latency = (model.num_layers - 1) * speed.latency
            reduction += count * (_gather(num_bytes, size, speed) + latency)
            weights += count * rounds * (_gather(num_bytes, size, speed) + latency)
        else:
            reduction += (count if stage == 2 else 1) * _all_reduce(num_bytes, size, speed)
            weights += _gather(num_bytes, size, speed) if stage else 0.0
    return reduction, weights


def _gather(num_bytes: float, num_ranks: int, speed: GroupSpeed) -> float:
    """An all-gather to ``num_bytes`` on each rank, or a reduce-scatter from there."""
    return speed.latency + num_bytes * (num_ranks - 1) / num_ranks / speed.bandwidth


def _all_reduce(num_bytes: float, num_ranks: int, speed: GroupSpeed) -> float:
    return 2 * _gather(num_bytes, num_ranks, speed)
