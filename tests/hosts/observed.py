"""Each rank: a short training that rank 0 writes down in the folder that is named, and what this rank saw of it.

Each host plays one GPU whose NVLink counters grow by so many bytes a second, 1000 on the host of rank 0 and 2000 on the
other: who reads them is real, what is read is not.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch.distributed as dist

from ds_hybrid.engine import observer
from ds_hybrid.observe.nvlink import GpuCounters
from tests.hosts.lab import tell
from tests.hosts.layers import Sizes, build, join, tokens_of_this_rank

SIZES = Sizes(num_tokens=24, hidden_size=16, num_experts=8, top_k=2)
NUM_STEPS, INTERVAL = 4, 2


def main() -> None:
    join()
    readings: Iterator[int] = count()
    per_second = 1000 * (1 + dist.get_rank() // 2)

    def read() -> dict[int, GpuCounters]:
        second = next(readings)
        counted = per_second * second
        return {0: GpuCounters(socket.gethostname(), int(1e6) * second, counted, counted // 2, (10_000,))}

    observer._read_nvlink = observer.read_counters = read
    observe = {"directory": sys.argv[-1], "interval": INTERVAL, "routing_trace": True}
    engine = build(SIZES, ep_size=4, dispatch={"mode": "two_stage"}, observe=observe).engine
    ids: list[Any] = []
    engine.module.moe.deepspeed_moe.gate.register_forward_hook(
        lambda _gate, _inputs, output: ids.append(output.routing.topk_ids.tolist())
    )
    losses = []
    for _ in range(NUM_STEPS):
        loss = engine(tokens_of_this_rank(SIZES)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    tell(rank=dist.get_rank(), host=socket.gethostname(), ids=ids, losses=losses, readings=next(readings))


if __name__ == "__main__":
    main()
