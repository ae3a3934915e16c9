"""Bytes of a rank: its states, activations, logits and buffers, and the most of them at one time. Pure.

Activations are what autograd keeps of Hugging Face's layers and of ds_hybrid's experts. Symbols as in ``plan.model``; b
bytes per value, N tokens and R rows that reach the rank's experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hybrid.plan.candidate import LOSS_CHUNK, Candidate, Workload
from ds_hybrid.plan.model import GroupedAttention, LatentAttention, ModelShape
from ds_hybrid.plan.routing import RankDemand
from ds_hybrid.plan.states import States, states

_INDEX, _FLOAT = 8, 4


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs the most, where routing is as uneven as in 99 of 100 layers or runs.

    Attributes:
        activations: what autograd keeps of all layers until backward; with checkpoints the layers' inputs.
        logits: of the loss and its backward.
        layer: the working set of one layer in its backward; with checkpoints what it keeps when computed again, too.
        gathered: with ZeRO 3 the parameters of the layers at work.
    """

    states: States
    activations: float
    logits: float
    layer: float
    gathered: float

    @property
    def peak(self) -> float:
        """The most at one time: in the loss, in the backward of the last layer or of the first, or in the step.

        While a backward goes on, gradients grow as activations shrink, so their sum is largest at one of its ends.
        """
        states = self.states
        in_loss = self.activations + self.logits
        in_last_layer = self.activations + self.layer
        in_first_layer = self.layer + states.gradients + states.reduction
        in_backward = self.gathered + max(in_loss, in_last_layer, in_first_layer)
        return states.weights + states.optimizer + states.buffers + max(in_backward, states.step)


def memory(model: ModelShape, work: Workload, candidate: Candidate, demand: RankDemand, *, held: float = 0.0) -> Memory:
    """Of a candidate; ``demand`` is that of its expert-parallel groups.

    Args:
        held: keys, values and gradients of other ranks in a layer whose ranks share out sequences.
    """
    work = candidate.part_of(work)
    saved_by_layer = _plain_layer(model, work, candidate)
    worst_moe = _moe_layer(model, work, candidate, demand, load=demand.load_p99)
    working = held + _dispatch_working_set(model, work, candidate, demand)
    if candidate.checkpoints:
        inputs = work.num_tokens * model.num_layers * model.hidden_size * work.value_bytes
        kept = inputs + _embedded(model, work)
        working += max(worst_moe, saved_by_layer if model.num_dense_layers else 0)
    else:
        kept = kept_by_layers(model, work, candidate, demand, load=demand.load_of_model_p99)
    return Memory(
        states=states(model, candidate, value_bytes=work.value_bytes),
        activations=kept,
        logits=_logits(model, work, candidate),
        layer=working,
        gathered=_gathered_layer(model, work, candidate),
    )


def kept_by_layers(
    model: ModelShape, part: Workload, candidate: Candidate, demand: RankDemand, *, load: float
) -> float:
    """What autograd keeps of all layers without checkpoints; ``part`` is the rank's, ``load`` that of its experts."""
    plain = model.num_dense_layers * _plain_layer(model, part, candidate)
    moe = model.num_moe_layers * _moe_layer(model, part, candidate, demand, load=load)
    return plain + moe + _embedded(model, part)


def saved_activations(model: ModelShape, work: Workload, candidate: Candidate, demand: RankDemand) -> float:
    """What autograd keeps after a forward of the whole model with its loss: activations, and what the loss keeps."""
    of_loss = _FLOAT * model.vocab_size * candidate.part_of(work).num_tokens
    return memory(model, work, candidate, demand).activations + of_loss


def _embedded(model: ModelShape, work: Workload) -> float:
    return work.num_tokens * (_norm(model.hidden_size, work) + 2 * _INDEX)


def _plain_layer(model: ModelShape, work: Workload, candidate: Candidate) -> float:
    mlp = 4 * model.dense_width * work.value_bytes
    return work.num_tokens * (_attention_block(model, work, candidate) + _norm(model.hidden_size, work) + mlp)


def _moe_layer(model: ModelShape, work: Workload, candidate: Candidate, demand: RankDemand, *, load: float) -> float:
    shared = 4 * model.shared_width * work.value_bytes
    router = _FLOAT * (model.num_experts + 3 * model.top_k) + _INDEX * model.top_k
    of_token = _attention_block(model, work, candidate) + _norm(model.hidden_size, work) + shared + router
    return work.num_tokens * of_token + _experts(model, work, candidate, demand, load)


def _experts(model: ModelShape, work: Workload, candidate: Candidate, demand: RankDemand, load: float) -> float:
    """What ds_hybrid's experts and dispatcher keep: tokens once, gate and up of each row, routing weights, indices."""
    size, b = model.hidden_size, work.value_bytes
    num_tokens = candidate.tokens_dispatched(work.num_tokens)
    rows = num_tokens * model.top_k * load / (candidate.ep_size if candidate.mode == "replicated" else 1)
    arrived = _arrived(candidate, demand, num_tokens, rows)
    kept = 2 * rows * model.expert_width * b + 2 * rows * _INDEX + arrived * (_INDEX + model.top_k * _FLOAT)
    # A group of one and a replicated one work on the layer's own tokens, which the norm before has counted.
    if candidate.ep_size > 1 and candidate.mode != "replicated":
        kept += arrived * size * b
    if candidate.mode == "alltoall":
        returned = num_tokens * model.top_k
        kept += returned * (size * b + 3 * _INDEX + _FLOAT)
    elif candidate.mode in ("two_stage", "hierarchical") and candidate.ep_size > 1:
        kept += num_tokens * 2 * _INDEX * min(model.top_k, candidate.ep_size)
    return kept


def _arrived(candidate: Candidate, demand: RankDemand, num_tokens: float, rows: float) -> float:
    """N: rows of tokens at the busiest rank, its own among them."""
    match candidate.mode:
        case "alltoall":
            return rows
        case "allgather":
            return num_tokens * candidate.ep_size
        case "replicated":
            return num_tokens
        case _:
            return num_tokens * candidate.ep_size * float(demand.rows.max())


def _dispatch_working_set(model: ModelShape, work: Workload, candidate: Candidate, demand: RankDemand) -> float:
    """Rows and hidden values that exist while one layer's experts run backward, and what is sent and arrives."""
    num_tokens = candidate.tokens_dispatched(work.num_tokens)
    rows = num_tokens * model.top_k * demand.load_p99
    rows /= candidate.ep_size if candidate.mode == "replicated" else 1
    arrived = rows
    if candidate.mode in ("two_stage", "hierarchical"):
        arrived = num_tokens * candidate.ep_size * demand.rows_p99
    elif candidate.mode != "alltoall":
        arrived = _arrived(candidate, demand, num_tokens, rows)
    width = 4 * model.hidden_size + 5 * model.expert_width
    return work.value_bytes * (rows * width + 3 * arrived * model.hidden_size)


def _attention_block(model: ModelShape, work: Workload, candidate: Candidate) -> float:
    """Of one token: the norm before attention, and attention, whose heads tensor parallelism shares out."""
    attention, b = model.attention, work.value_bytes
    heads = attention.num_heads / candidate.tp_size
    kv_heads = attention.num_kv_heads / candidate.tp_size
    output = heads * attention.value_dim * b
    if isinstance(attention, LatentAttention):
        whole = _norm(attention.q_rank or 0, work) + _norm(attention.kv_rank, work)
        values = attention.plain_dim + attention.value_dim if work.attention == "fused" else attention.value_dim
        per_head = heads * (2 * attention.score_dim + values) * b
    else:
        assert isinstance(attention, GroupedAttention)
        whole = 0.0
        copies = heads if work.attention == "eager" else kv_heads
        per_head = (heads * attention.head_dim + 2 * copies * attention.head_dim) * b
        if attention.has_head_norms:
            per_head += (heads + kv_heads) * attention.head_dim * (_FLOAT + b)
    scores = heads * _FLOAT
    if work.attention == "eager":
        scores = heads * work.seq_len * (_FLOAT + (b if b < _FLOAT else 0))
    return _norm(model.hidden_size, work) + whole + per_head + output + scores


def _norm(width: int, work: Workload) -> float:
    """Of one token: the input in float32, the normalized value, and the output, which the next matrix keeps."""
    return width * (_FLOAT + 2 * work.value_bytes)


def _logits(model: ModelShape, work: Workload, candidate: Candidate) -> float:
    """In float32 their logarithm of softmax and two gradients; launch/train.py lets go of the logits themselves."""
    num_tokens = min(work.num_tokens, LOSS_CHUNK) if candidate.chunked_loss else work.num_tokens
    return float(num_tokens * model.vocab_size * 3 * _FLOAT)


def _gathered_layer(model: ModelShape, work: Workload, candidate: Candidate) -> float:
    """ZeRO 3 gathers the layer at work and the next one; a layer's gradients exist whole before they are reduced."""
    if candidate.zero_stage < 3:
        return 0.0
    dense = model.attention.num_sharded(model.hidden_size) / candidate.tp_size
    dense += 3 * model.hidden_size * (model.shared_width or model.dense_width)
    experts = model.num_experts * model.parameters_of_expert / candidate.ep_size
    embedding = model.vocab_size * model.hidden_size
    return 3 * work.value_bytes * max(dense + experts, embedding)
