"""Seconds of one step of a rank, and what leaves it: compute, and each collective on its link. Pure.

One step is a forward and backward of each micro-batch and the optimizer's step. The rank with the busiest experts sets
the pace of each layer. What hides: with ZeRO 3 DeepSpeed gathers and reduces beside compute, and keys and values of a
sequence that is shared out travel beside attention. Everything else waits, as ``overlap_comm`` is off by default below
stage 3 and dispatch runs in one chunk. A message takes its latency and its bytes over the bandwidth (Hockney's model).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ds_hybrid.dispatch.modes import Mode
from ds_hybrid.dispatch.predict import DemandTable, GroupSpeed, Way, messages
from ds_hybrid.dispatch.traffic import INTEGER_BYTES, WireShape
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.machine import Machine
from ds_hybrid.plan.memory import kept_by_layers
from ds_hybrid.plan.model import ModelShape
from ds_hybrid.plan.routing import RankDemand
from ds_hybrid.plan.sequence import Gathers
from ds_hybrid.plan.states import has_master, num_updated
from ds_hybrid.plan.traffic import Sent, all_gather, all_reduce, tensor_parallel_traffic, zero_traffic
from ds_hybrid.topology.cluster import Cluster
from ds_hybrid.topology.layout import Layout, consecutive_groups
from ds_hybrid.topology.packing import Groups

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
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """What makes up the step: name -> seconds."""
        return {name: seconds for name, seconds in vars(self).items() if name != "hidden"}


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
    """Of a layout."""
    kinds = ring_groups(layout, cluster.num_ranks, sp_size)
    return Rings(*(slowest_ring(machine, cluster, groups) for groups in kinds))


def ring_groups(layout: Layout, num_ranks: int, sp_size: int) -> tuple[Groups, Groups, Groups, Groups]:
    """The groups of each kind, as :class:`Rings` has them; the ranks that share a sequence are consecutive."""
    return layout.tp_groups, consecutive_groups(num_ranks, sp_size), layout.dp_groups, layout.edp_groups


def slowest_ring(machine: Machine, cluster: Cluster, groups: Groups) -> GroupSpeed:
    """What the slowest of ``groups`` reaches in its rings."""
    return min((machine.ring(group, cluster) for group in groups), key=lambda speed: speed.bandwidth)


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
    of_dense, of_experts = zero_traffic(model, work, candidate)
    reduction = of_dense.reduction.seconds(speeds.dp) + of_experts.reduction.seconds(speeds.edp)
    weights = of_dense.gathers.seconds(speeds.dp) + of_experts.gathers.seconds(speeds.edp)
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
        tensor_parallel=tensor_parallel_traffic(model, work, candidate).seconds(speeds.tp),
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
    exchanges = list(messages(candidate.mode, table, shape, node_of_rank=node_of_rank))
    busiest = ((m.way, float(max(m.sent.max(), m.received.max()))) for m in exchanges)
    seconds = sum(Sent(1, num_bytes).seconds(links[way]) for way, num_bytes in busiest)
    sent = sum(float(m.sent.sum()) for m in exchanges)
    return DispatchCost(seconds, sent, 4 * shape.row_bytes * float(rows.sum() - np.trace(rows)))


def group_links(machine: Machine, cluster: Cluster, group: Sequence[int], mode: Mode) -> Mapping[Way, GroupSpeed]:
    """What the exchanges of a dispatcher reach in a group: all-gathers run in rings, the others directly."""
    whole = machine.ring if mode == "allgather" else machine.all_to_all
    return {"group": whole(group, cluster), "across": machine.across, "inside": machine.inside}


def nodes_of(group: Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    """The node of each rank of a group, counted from 0."""
    hosts = [cluster.host_of_rank[rank] for rank in group]
    number = {host: index for index, host in enumerate(sorted(set(hosts)))}
    return tuple(number[host] for host in hosts)


def _replicated_cost(shape: WireShape, num_tokens: float, speed: GroupSpeed) -> DispatchCost:
    """A header; all-reduces of the output in forward, of the gradients of tokens and routing weights in backward."""
    sizes = [num_tokens * shape.row_bytes] * 2 + [num_tokens * shape.riding_bytes]
    header = INTEGER_BYTES * (1 + shape.num_facts) * shape.num_ranks
    sent = sum((all_reduce(size, shape.num_ranks) for size in sizes), start=all_gather(header, shape.num_ranks))
    return DispatchCost(sent.seconds(speed), sent.num_bytes * shape.num_ranks, 0.0)


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
