"""Bytes of a rank that outlive a forward and a backward: weights, gradients and optimizer states by ZeRO stage. Pure.

They are what DeepSpeed 0.19.8 allocates with Adam: from ZeRO 1 on a float32 master and two float32 moments of this
rank's partition, also in float32 training; experts are partitioned over the ranks that hold the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from ds_hybrid.plan.candidate import Candidate
from ds_hybrid.plan.model import ModelShape

_FLOAT = 4
MAX_BUCKET = 500_000_000
"""DeepSpeed's default ``reduce_bucket_size``, in elements."""
_EXPERT_GROUP, _ZERO3_GROUP = 178_956_971, 1_000_000_000
"""Elements that a step updates at a time: of experts (``max_group_size`` of DeepSpeed's moe/utils.py), and with ZeRO 3
(``sub_group_size``)."""


@dataclass(frozen=True)
class States:
    """What outlives a forward and a backward, in bytes.

    Attributes:
        gradients: at the end of a backward.
        reduction: what DeepSpeed needs beside them to add them up over the ranks.
        step: what the optimizer's step needs beside its states: gradients in the weights' dtype, and of what is updated
            at a time a float32 copy and the square root of the second moment.
        buffers: what is there from the start, as ZeRO 3 has its gradients and what it reduces them with; these two are
            0 then.
    """

    weights: float
    gradients: float
    optimizer: float
    reduction: float
    step: float
    buffers: float = 0.0


def has_master(candidate: Candidate, value_bytes: int) -> bool:
    """Whether a float32 master lies beside the weights."""
    return candidate.zero_stage > 0 or value_bytes < _FLOAT


def num_updated(model: ModelShape, candidate: Candidate) -> float:
    """Elements that the optimizer of a rank updates in a step."""
    dense = model.num_sharded_parameters / candidate.tp_size + model.num_whole_parameters
    experts = model.num_expert_parameters / candidate.ep_size
    if candidate.zero_stage == 0:
        return dense + experts
    return dense / candidate.dp_size + experts / candidate.edp_size


def states(model: ModelShape, candidate: Candidate, *, value_bytes: int) -> States:
    """Weights, gradients and optimizer states of a rank."""
    dense = model.num_sharded_parameters / candidate.tp_size + model.num_whole_parameters
    experts = model.num_expert_parameters / candidate.ep_size
    whole, part = dense + experts, dense / candidate.dp_size + experts / candidate.edp_size
    stage = candidate.zero_stage
    owned = num_updated(model, candidate)
    one_matrix = model.parameters_of_expert / 3 * model.num_experts / candidate.ep_size
    group_of_experts = min(experts, max(_EXPERT_GROUP, one_matrix)) / candidate.edp_size
    at_a_time = {0: whole, 3: min(part, _ZERO3_GROUP)}.get(stage, max(dense / candidate.dp_size, group_of_experts))
    mastered = has_master(candidate, value_bytes)
    gradients = value_bytes * {2: part + _straddling(model, candidate), 3: part}.get(stage, whole)
    reduction = 0.0 if stage == 0 else float(value_bytes * reduce_bucket_size(model, candidate))
    step = (2 if mastered else 1) * _FLOAT * at_a_time
    optimizer = (3 if mastered else 2) * _FLOAT * owned
    if stage == 3:
        return States(value_bytes * part, 0.0, optimizer, 0.0, step, buffers=gradients + reduction)
    return States(value_bytes * whole, gradients, optimizer, reduction, value_bytes * owned + step)


def _straddling(model: ModelShape, candidate: Candidate) -> float:
    """Elements: with ZeRO 2 a rank keeps the whole gradient of a parameter of which it owns a part.

    AutoEP's parameters are stacks of a rank's experts, all of one size. What is dense is taken to straddle as the input
    embedding does, its largest parameter.
    """
    dense = (candidate.dp_size - 1) / candidate.dp_size * model.vocab_size * model.hidden_size
    copies, num_stacks = candidate.edp_size, 3 * model.num_moe_layers
    stack = model.parameters_of_expert / 3 * model.num_experts / candidate.ep_size
    return dense + (copies - gcd(copies, num_stacks)) / copies * stack


def reduce_bucket_size(model: ModelShape, candidate: Candidate) -> int:
    """Elements: DeepSpeed's default, or all gradients of the rank where they are fewer."""
    dense = model.num_sharded_parameters // candidate.tp_size + model.num_whole_parameters
    return min(MAX_BUCKET, dense + model.num_expert_parameters // candidate.ep_size)
