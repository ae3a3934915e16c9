"""Attention over a group of ranks whose schedule is picked when the first tensors of a size come."""

from __future__ import annotations

import logging
import time

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist
from torch import Tensor

from ds_hybrid.attention.choose import Attention, Choice, Schedule, choose
from ds_hybrid.attention.kv_gather import KVGatherAttention
from ds_hybrid.attention.masks import Sight
from ds_hybrid.attention.traffic import KVShape
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.measure import measure_link
from ds_hybrid.dispatch.modes import WireDtype
from ds_hybrid.dispatch.predict import GroupSpeed

_MATMUL_SIDE = 512
_NUM_REPEATS = 5


class ScheduledAttention:
    """:class:`KVGatherAttention` for tensors of any size. Making one is collective over the group: it is measured.

    Args:
        group: the ranks that share sequences.
        choice: a variant, or ``"auto"``.
        wire_dtype: how keys and values travel.
        memory_bytes: what the keys, values and gradients of other ranks may take in a layer; see ``choose``.
    """

    def __init__(
        self,
        group: RankGroup,
        choice: Choice,
        *,
        wire_dtype: WireDtype = "auto",
        memory_bytes: int | None = None,
    ) -> None:
        self.group = group
        self.choice: Choice = choice
        self.wire_dtype: WireDtype = wire_dtype
        self.memory_bytes = memory_bytes
        self._speed, self._matmul_flops = _measured(group)
        self._made: dict[Attention, KVGatherAttention] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sight: Sight,
        *,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """As :class:`KVGatherAttention`, for any head sizes and lengths. All ranks call it together."""
        shape = KVShape(
            num_ranks=self.group.size,
            batch_size=key.shape[0],
            shard_length=key.shape[2],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            value_head_dim=value.shape[3],
            value_bytes=key.element_size(),
            wire_dtype=self.wire_dtype,
        )
        attention = self._of(Attention(shape, query.shape[1], sight.rule.causal, sight.rule.window))
        return attention(query, key, value, sight, scale=scale, dropout=dropout)

    @property
    def schedules(self) -> dict[Attention, Schedule]:
        """What was picked so far, by the sizes."""
        return {attention: made.schedule for attention, made in self._made.items()}

    def _of(self, attention: Attention) -> KVGatherAttention:
        if attention not in self._made:
            schedule, reason = choose(
                self.choice,
                attention,
                speed=self._speed,
                matmul_flops=self._matmul_flops,
                memory_bytes=self.memory_bytes,
            )
            log_dist(f"ds_hybrid.attention.kv_gather: {reason}", ranks=[0], level=logging.INFO)
            self._made[attention] = KVGatherAttention(self.group, schedule, wire_dtype=self.wire_dtype)
        return self._made[attention]


def _measured(group: RankGroup) -> tuple[GroupSpeed, float]:
    """The link and the matrix products of the slowest rank, so that all ranks pick alike. Collective."""
    link = measure_link(group)
    device = get_accelerator().current_device_name()
    slowest = torch.tensor([link.latency, 1 / link.bandwidth, 1 / _matmul_flops(device)], dtype=torch.float64)
    slowest = slowest.to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group.process_group)
    latency, per_byte, per_flop = slowest.tolist()
    return GroupSpeed(latency, 1 / per_byte), 1 / per_flop


def _matmul_flops(device: str) -> float:
    matrix = torch.ones(_MATMUL_SIDE, _MATMUL_SIDE, device=device)
    seconds = []
    for _ in range(1 + _NUM_REPEATS):  # the first one warms up
        get_accelerator().synchronize()
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * _MATMUL_SIDE**3 / max(min(seconds[1:]), 1e-9)
