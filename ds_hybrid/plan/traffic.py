"""What leaves a rank in a step beside dispatch: gradients, weights and what tensor parallelism joins. Pure.

Collectives run in rings: an all-reduce of n bytes over P ranks sends 2 n (P-1)/P from each, an all-gather to n bytes or
a reduce-scatter from there n (P-1)/P. Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication
Operations in MPICH, 2005.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hybrid.dispatch.predict import GroupSpeed
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.model import ModelShape

_FLOAT = 4


@dataclass(frozen=True)
class Sent:
    """Messages one after the other in a group: how many, and the bytes that leave a rank in all of them."""

    num_messages: float = 0.0
    num_bytes: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.num_messages + other.num_messages, self.num_bytes + other.num_bytes)

    def __mul__(self, times: float) -> Sent:
        return Sent(times * self.num_messages, times * self.num_bytes)

    def seconds(self, speed: GroupSpeed) -> float:
        """By Hockney's model: each message takes the latency, and its bytes."""
        return self.num_messages * speed.latency + self.num_bytes / speed.bandwidth


@dataclass(frozen=True)
class ZeroTraffic:
    """What ZeRO sends of a kind of parameter in a step: gradients that are added up, weights that are gathered."""

    reduction: Sent
    gathers: Sent


def all_gather(num_bytes: float, num_ranks: int) -> Sent:
    """To ``num_bytes`` on each rank; a reduce-scatter from there sends as much."""
    return Sent(1.0, num_bytes * (num_ranks - 1) / num_ranks)


def all_reduce(num_bytes: float, num_ranks: int) -> Sent:
    """Of ``num_bytes`` on each rank: a reduce-scatter and an all-gather."""
    return all_gather(num_bytes, num_ranks) * 2


def tensor_parallel_traffic(model: ModelShape, work: Workload, candidate: Candidate) -> Sent:
    """Of a step: all-reduces after sharded attention and, backward, before it; shares of tokens joined again; and the
    gradients of all that every rank has whole.

    What goes backward is added up in float32: the gradient of what enters attention, and those of its parameters that
    every rank has whole (``engine/tensor_parallel.py``). DeepSpeed then takes the mean of the gradients of everything
    whole, in float32 too, once a step or, from ZeRO 2 on, with every micro-batch (``reduce_autoep_folding_gradient`` of
    its 0.19.8); what is whole in a layer is taken as one message.
    """
    size, count = candidate.tp_size, candidate.micro_batches
    if size == 1:
        return Sent()
    attention, b = model.attention, work.value_bytes
    whole = attention.num_whole_matrices(model.hidden_size) + attention.num_norms
    leave = all_reduce(work.num_tokens * model.hidden_size * b, size)
    enter = all_reduce(work.num_tokens * model.hidden_size * _FLOAT, size)
    inside = all_reduce(whole * _FLOAT, size) if whole else Sent()
    sent = (leave * (2 if candidate.checkpoints else 1) + enter + inside) * (count * model.num_layers)
    if candidate.ep_size == 1:
        return sent
    means = all_reduce(model.num_whole_parameters / model.num_layers * _FLOAT, size) * model.num_layers
    sent += means * (count if candidate.zero_stage >= 2 else 1)
    if candidate.mode == "replicated":
        return sent
    join = all_gather(work.num_tokens * model.hidden_size * b, size)
    weights = all_gather(work.num_tokens * model.top_k * _FLOAT, size)
    return sent + (join * (3 if candidate.checkpoints else 2) + weights) * (count * model.num_moe_layers)


def zero_traffic(model: ModelShape, work: Workload, candidate: Candidate) -> tuple[ZeroTraffic, ZeroTraffic]:
    """Of a step: of what is dense, over its copies, and of experts, over theirs.

    Below stage 3 DeepSpeed adds up by all-reduce and gathers after a step. Stages 0 and 1 add up once a step, 2 and 3
    with every micro-batch. Source: ``allreduce_and_scatter`` of DeepSpeed 0.19.8, the default of its stages 1 and 2.
    """
    dense = model.num_sharded_parameters / candidate.tp_size + model.num_whole_parameters
    experts = model.num_expert_parameters / candidate.ep_size
    b = work.value_bytes
    return (
        _zero_of(b * dense, candidate.dp_size, model.num_layers, candidate),
        _zero_of(b * experts, candidate.edp_size, model.num_layers, candidate),
    )


def _zero_of(num_bytes: float, num_copies: int, num_layers: int, candidate: Candidate) -> ZeroTraffic:
    if num_copies == 1:
        return ZeroTraffic(Sent(), Sent())
    stage, count = candidate.zero_stage, candidate.micro_batches
    whole = all_gather(num_bytes, num_copies)
    if stage == 3:
        by_layer = Sent(num_layers, whole.num_bytes)
        # Forward and backward each gather a layer; so does computing it again.
        return ZeroTraffic(by_layer * count, by_layer * (count * (3 if candidate.checkpoints else 2)))
    reduction = all_reduce(num_bytes, num_copies) * (count if stage == 2 else 1)
    return ZeroTraffic(reduction, whole if stage else Sent())
