"""Which exchange of keys and values is quickest here: for each size once, by measured links and matrix products."""

from __future__ import annotations

import logging
import time

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist

from ds_hybrid.attention.choose import AttentionShape, Choice, Schedule, choose
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.measure import measure_link
from ds_hybrid.dispatch.predict import GroupSpeed

_MATMUL_SIDE = 512
_MATMUL_SIDE_ON_ACCELERATOR = 4096
"""There a smaller product takes as long as it takes to start it."""
_NUM_REPEATS = 5


class Scheduler:
    """Picks schedules, the same ones on every rank. Making one is collective over the group: its links are measured.

    Args:
        group: the ranks that share sequences.
        choice: a variant, or ``"auto"``.
        memory_bytes: what the keys, values and gradients of other ranks may take in a layer; see ``choose``.
    """

    def __init__(self, group: RankGroup, choice: Choice, *, memory_bytes: int | None = None) -> None:
        self._group = group
        self._choice: Choice = choice
        self._memory_bytes = memory_bytes
        self._speed = _measured_link(group)
        self._matmul_flops: dict[torch.dtype, float] = {}
        self._picked: dict[tuple[AttentionShape, torch.dtype], Schedule] = {}

    def __call__(self, attention: AttentionShape, dtype: torch.dtype) -> Schedule:
        """For a layer whose tensors have this dtype. All ranks call it together."""
        layer = attention, dtype
        if layer not in self._picked:
            self._picked[layer], reason = choose(
                self._choice,
                attention,
                speed=self._speed,
                matmul_flops=self._flops_in(dtype),
                memory_bytes=self._memory_bytes,
            )
            log_dist(f"ds_hybrid.attention.kv_gather: {reason}", ranks=[0], level=logging.INFO)
        return self._picked[layer]

    def _flops_in(self, dtype: torch.dtype) -> float:
        """Measured when the first tensors of a dtype come, on all ranks at once."""
        if dtype not in self._matmul_flops:
            self._matmul_flops[dtype] = _measured_flops(self._group, dtype)
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
