"""A step whose ranks share out each sequence, and gather keys and values for attention. Pure.

A model of what may come: the engine has no sequence-sharded attention yet.
"""

from __future__ import annotations

from dataclasses import replace

from ds_hybrid.dispatch.predict import GroupSpeed
from ds_hybrid.plan.candidate import Workload
from ds_hybrid.plan.machine import Machine
from ds_hybrid.plan.model import GroupedAttention, ModelShape
from ds_hybrid.plan.time import StepTime


def shared_out(
    whole: StepTime,
    model: ModelShape,
    work: Workload,
    machine: Machine,
    speed: GroupSpeed,
    *,
    num_shards: int,
    hides: bool,
    checkpoints: bool,
) -> StepTime:
    """The step of a rank that has one of ``num_shards`` parts of the sequences of ``whole``.

    What grows with tokens falls; weights and their gradients stay. The gathers that attention waits for are under
    ``tensor_parallel``, those beside it under ``hidden``: while a block of keys and values is worked on, the next one
    arrives, and the first is the rank's own.

    Args:
        speed: of the ranks that share a sequence, in a ring.
    """
    assert isinstance(model.attention, GroupedAttention), model.attention
    attention = model.attention
    part = 1 / num_shards
    num_bytes = work.num_tokens * 2 * attention.num_kv_heads * attention.head_dim * work.value_bytes
    gather = speed.latency + num_bytes * (1 - part) / speed.bandwidth
    scores = work.num_tokens * part * model.score_flops(work.seq_len, causal=work.attention == "fused")
    beside = scores / model.num_layers / machine.matmul_flops * (1 - part)
    # Gathered in forward, again where it is computed again; gradients go home beside a backward of twice the work.
    passes = [beside] * (2 if checkpoints else 1) + [2 * beside]
    hidden = model.num_layers * sum(min(gather, compute) for compute in passes) if hides else 0.0
    return replace(
        whole,
        dense=whole.dense * part,
        experts=whole.experts * part,
        memory_bound=whole.memory_bound * part,
        tensor_parallel=model.num_layers * len(passes) * gather - hidden,
        hidden=whole.hidden + hidden,
    )
