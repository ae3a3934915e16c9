"""One of the ranks that :mod:`ds_hybrid.calibrate.calibration` starts: how fast it is while the others work too.

Rank 0 prints one line of JSON, ``{"rates": {...}}``: of each rate the slowest rank's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.measure import measure_link
from ds_hybrid.dispatch.meter import Meter

_ROUNDS = 7
_ROUND_SECONDS = 0.3
_SIZE = {"cpu": 512, "cuda": 8192}
"""Rows and columns of the matrices."""
_NUM_EXPERTS = 8
_COPIED = {"cpu": 2**25, "cuda": 2**30}
"""Bytes that are copied at a time: more than a cache holds."""


def main() -> None:
    """Measure and report. The first argument is the dtype of the matrices, as torch calls it."""
    dtype = getattr(torch, sys.argv[1])
    accelerator = get_accelerator()
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    if accelerator.device_name() == "cpu":
        torch.set_num_threads(1)
    deepspeed.init_distributed(accelerator.communication_backend_name(), verbose=False)
    rates = {**compute_rates(dtype), **link_rates()}
    every: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, rates)
    if dist.get_rank() == 0:
        print(json.dumps({"rates": slowest(every)}), flush=True)
    dist.destroy_process_group()


def slowest(rates_of_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each rate the lowest of all ranks; of the latency the highest."""
    return {
        name: (max if name == "latency_seconds" else min)(rates[name] for rates in rates_of_rank)
        for name in rates_of_rank[0]
    }


def compute_rates(dtype: torch.dtype) -> dict[str, float]:
    """FLOP/s of a matrix product and of a grouped one; bytes per second that a copy reads and writes."""
    device = torch.device(get_accelerator().current_device_name())
    size = _SIZE[device.type]
    rows = torch.randn(size, size, dtype=dtype, device=device)
    weights = torch.randn(_NUM_EXPERTS, size, size, dtype=dtype, device=device)
    ends = torch.arange(1, _NUM_EXPERTS + 1, dtype=torch.int32, device=device) * (size // _NUM_EXPERTS)
    source = torch.zeros(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    flops = 2.0 * size**3
    return {
        "matmul_flops": flops / _median_seconds(lambda: rows @ rows),
        "expert_flops": flops / _median_seconds(lambda: torch._grouped_mm(rows, weights, offs=ends)),
        "memory_bytes_per_second": 2 * len(source) / _median_seconds(lambda: target.copy_(source)),
        "memory_bytes": float(_memory_of_rank(device)),
        "overlap": 0.0 if device.type == "cpu" else 0.8,
    }


def link_rates() -> dict[str, float]:
    """Of an exchange of all ranks with all, by the measurement that ``auto`` chooses dispatchers by."""
    speed = measure_link(RankGroup(dist.group.WORLD, Meter()))
    return {"bytes_per_second": speed.bandwidth, "latency_seconds": speed.latency}


def _median_seconds(work: Callable[[], Tensor]) -> float:
    """Of one call. All ranks work at the same time, for so long that those who share a core share it here too."""
    work()  # warms up
    num_calls = max(1, round(_ROUND_SECONDS / _seconds(work, 1)))
    return median(_seconds(work, num_calls) / num_calls for _ in range(_ROUNDS))


def _seconds(work: Callable[[], Tensor], num_calls: int) -> float:
    accelerator = get_accelerator()
    dist.barrier()
    accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(num_calls):
        work()
    accelerator.synchronize()
    return time.perf_counter() - start


def _memory_of_rank(device: torch.device) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ["LOCAL_SIZE"])
    return int(get_accelerator().total_memory())


if __name__ == "__main__":
    main()
