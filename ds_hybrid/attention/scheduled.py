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
_MATMUL_SIDE_ON_ACCELERATOR = 4096
"""There a smaller product takes as long as it takes to start it."""
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
        self._speed = _measured_link(group)
        self._matmul_flops: dict[torch.dtype, float] = {}
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
        attention = self._of(Attention(shape, query.shape[1], sight.rule.causal, sight.rule.window), key.dtype)
        return attention(query, key, value, sight, scale=scale, dropout=dropout)

    @property
    def schedules(self) -> dict[Attention, Schedule]:
        """What was picked so far, by the sizes."""
        return {attention: made.schedule for attention, made in self._made.items()}

    def _of(self, attention: Attention, dtype: torch.dtype) -> KVGatherAttention:
        if attention not in self._made:
            schedule, reason = choose(
                self.choice,
                attention,
                speed=self._speed,
                matmul_flops=self._flops_in(dtype),
                memory_bytes=self.memory_bytes,
            )
            log_dist(f"ds_hybrid.attention.kv_gather: {reason}", ranks=[0], level=logging.INFO)
            self._made[attention] = KVGatherAttention(self.group, schedule, wire_dtype=self.wire_dtype)
        return self._made[attention]

    def _flops_in(self, dtype: torch.dtype) -> float:
        """Measured when the first tensors of a dtype come, on all ranks at once."""
        if dtype not in self._matmul_flops:
            self._matmul_flops[dtype] = _measured_flops(self.group, dtype)
        return self._matmul_flops[dtype]


def _measured_link(group: RankGroup) -> GroupSpeed:
    """The link of the slowest rank, so that all ranks pick alike. Collective."""
    link = measure_link(group)
    latency, per_byte = _slowest(group, link.latency, 1 / link.bandwidth)
    return GroupSpeed(latency, 1 / per_byte)


def _measured_flops(group: RankGroup, dtype: torch.dtype) -> float:
    """Matrix products of the slowest rank. Collective."""
    (per_flop,) = _slowest(group, 1 / _matmul_flops(get_accelerator().current_device_name(), dtype))
    return 1 / per_flop


def _slowest(group: RankGroup, *seconds: float) -> list[float]:
    of_group = torch.tensor(seconds, dtype=torch.float64).to(get_accelerator().current_device_name())
    dist.all_reduce(of_group, op=dist.ReduceOp.MAX, group=group.process_group)
    slowest: list[float] = of_group.tolist()
    return slowest


def _matmul_flops(device: str, dtype: torch.dtype) -> float:
    side = _MATMUL_SIDE if torch.device(device).type == "cpu" else _MATMUL_SIDE_ON_ACCELERATOR
    matrix = torch.ones(side, side, device=device, dtype=dtype)
    seconds = []
    for _ in range(1 + _NUM_REPEATS):  # the first one warms up
        get_accelerator().synchronize()
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / max(min(seconds[1:]), 1e-9)
