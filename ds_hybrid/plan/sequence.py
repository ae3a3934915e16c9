"""Ranks that share out each sequence: what gathering keys and values costs them. Pure.

The forms are those of ``ds_hybrid.attention``: its choice of a schedule, on its virtual clock. Shards are cut so that
causal ranks have equal work.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hybrid.attention.choose import AttentionShape, choose, forecast, held_bytes
from ds_hybrid.attention.traffic import KVShape, backward_bytes, forward_bytes
from ds_hybrid.dispatch.predict import GroupSpeed
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.machine import Machine
from ds_hybrid.plan.model import ModelShape


@dataclass(frozen=True)
class Gathers:
    """Of all layers of a rank, in one micro-batch.

    Attributes:
        exposed, hidden: seconds of the link that attention waits for, and beside which it computes.
        wire_bytes: that leave the rank.
        held: bytes of other ranks' keys, values and gradients, in one layer at its fullest.
    """

    exposed: float = 0.0
    hidden: float = 0.0
    wire_bytes: float = 0.0
    held: float = 0.0


def gathers(model: ModelShape, work: Workload, candidate: Candidate, machine: Machine, speed: GroupSpeed) -> Gathers:
    """As ``kv_gather: auto`` would have them; nothing where sequences are not shared out.

    Args:
        speed: of the ranks that share a sequence.
    """
    if candidate.sp_size == 1:
        return Gathers()
    kv = KVShape(
        candidate.sp_size,
        work.micro_batch,
        candidate.part_of(work).seq_len,
        model.attention.num_kv_heads,
        model.attention.score_dim,
        model.attention.value_dim,
        work.value_bytes,
    )
    attention = AttentionShape(kv, model.attention.num_heads, causal=True)
    schedule, _ = choose("auto", attention, speed=speed, matmul_flops=machine.matmul_flops)
    forward, backward = forecast(schedule, attention, speed, machine.matmul_flops)
    num_forwards = 2 if candidate.checkpoints else 1
    exposed = num_forwards * forward.exposed + backward.exposed
    busy = num_forwards * forward.busy + backward.busy
    sent = num_forwards * forward_bytes(kv) + backward_bytes(schedule.variant, kv)
    return Gathers(
        exposed=model.num_layers * exposed,
        hidden=model.num_layers * (busy - exposed),
        wire_bytes=float(model.num_layers * sent),
        held=float(held_bytes(schedule, attention)),
    )
