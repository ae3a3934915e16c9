"""A one-time measurement of the links of a group of ranks."""

from __future__ import annotations

import time

import torch
from deepspeed.accelerator import get_accelerator

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.predict import GroupSpeed

_SMALL, _LARGE = 64, 2**20
_NUM_REPEATS = 5


def measure_link(group: RankGroup) -> GroupSpeed:
    """Time an exchange of all ranks with all, with 64 bytes and with 1 MiB for each; the best of 5 repeats.

    Collective over the group. The ranks may see different figures: what decides must be agreed afterwards.
    """
    quick, slow = _best_seconds(group, _SMALL), _best_seconds(group, _LARGE)
    leaving = (_LARGE - _SMALL) * (group.size - 1)
    return GroupSpeed(latency=quick, bandwidth=leaving / max(slow - quick, 1e-9))


def _best_seconds(group: RankGroup, num_bytes: int) -> float:
    device = get_accelerator().current_device_name()
    rows = torch.zeros((group.size, num_bytes), dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(1 + _NUM_REPEATS):  # the first one warms up
        get_accelerator().synchronize()
        start = time.perf_counter()
        group.all_to_all(rows, [1] * group.size, [1] * group.size).wait()
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
