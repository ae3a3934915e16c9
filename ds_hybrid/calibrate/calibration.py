"""Ranks on this host measure what the planner needs to know of it: a table like those of ds_configs/machines."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from glob import glob
from typing import Any

from ds_hybrid.doctor.processes import Command, Outcome, run_together
from ds_hybrid.errors import TopologyError

TIME_LIMIT = 420.0
"""Seconds. On a CPU the ranks may first compile an op, which takes about a minute of a quiet machine."""

_DTYPES = {"bf16": "bfloat16", "float32": "float32"}
_GRACE = 5.0
_NO_LINK = 1e13
"""Bytes per second that no link has: a large message took no longer than a small one."""


def calibrate(
    num_ranks: int, dtype: str, environment: Mapping[str, str], *, time_limit: float = TIME_LIMIT
) -> dict[str, Any]:
    """Start ``num_ranks`` on this host, let them measure, and make a table of it.

    Args:
        dtype: of the matrices, bf16 or float32.
        environment: of the ranks, less what a launcher adds.

    Raises:
        TopologyError: a rank failed, they were not done in time, or the host was too busy to measure its links.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    commands = [_rank(place, num_ranks, port, dtype, environment) for place in range(num_ranks)]
    try:
        outcomes = run_together(commands, time_limit=time_limit, failure_grace=_GRACE)
    finally:
        for path in glob(f"/dev/shm/deepspeed_allreduce_buffer_*_{port}_*"):
            os.unlink(path)
    return table(_rates(outcomes, time_limit), num_ranks=num_ranks, dtype=dtype)


def table(rates: Mapping[str, float], *, num_ranks: int, dtype: str) -> dict[str, Any]:
    """What :class:`ds_hybrid.plan.machine.MachineTable` reads, of measured rates; efficiencies are of those."""
    by = f"measured: ds_hybrid calibrate, {num_ranks} ranks at once, {dtype}"
    reached = "the rate above is what was reached"
    other_hosts = "not measured, as there was one host: taken as inside. Put in your network's"

    def number(value: float, source: str) -> dict[str, Any]:
        return {"value": float(f"{value:.4g}"), "source": source}

    return {
        "ranks_per_host": num_ranks,
        "link_kind": "HOST",
        "memory_bytes": number(rates["memory_bytes"], by),
        "memory_bytes_per_second": number(rates["memory_bytes_per_second"], f"{by}, a copy"),
        "matmul_flops": number(rates["matmul_flops"], by),
        "inside_bytes_per_second": number(rates["bytes_per_second"], f"{by}, an exchange of all with all"),
        "inside_latency_seconds": number(rates["latency_seconds"], f"{by}, 64 bytes to each"),
        "across_bytes_per_second": number(rates["bytes_per_second"], other_hosts),
        "across_latency_seconds": number(rates["latency_seconds"], other_hosts),
        "matmul_efficiency": number(1.0, reached),
        "expert_efficiency": number(min(1.0, rates["expert_flops"] / rates["matmul_flops"]), f"{by}, grouped products"),
        "memory_efficiency": number(1.0, reached),
        "link_efficiency": number(1.0, reached),
        "overlap": number(rates["overlap"], "assumption: none beside compute on the CPU, 0.8 of it on GPUs"),
        "usable_memory": number(0.9, "assumption: what the system leaves"),
    }


def _rank(place: int, num_ranks: int, port: int, dtype: str, environment: Mapping[str, str]) -> Command:
    launcher = {
        "RANK": str(place),
        "LOCAL_RANK": str(place),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    argv = [sys.executable, "-m", "ds_hybrid.calibrate.rank", _DTYPES[dtype]]
    return Command(argv, {"OMP_NUM_THREADS": "1", **environment, **launcher})


def _rates(outcomes: list[Outcome], time_limit: float) -> dict[str, float]:
    for place, outcome in enumerate(outcomes):
        if outcome.code is None:
            raise TopologyError(
                f"rank {place} was not done after {time_limit:.0f} seconds. Try: ds_hybrid doctor, which finds locks."
            )
        if outcome.code != 0:
            raise TopologyError(f"rank {place} ended with exit code {outcome.code}: {outcome.complaint or 'no word'}")
    lines = [line for line in outcomes[0].output.splitlines() if line.startswith('{"rates"')]
    assert len(lines) == 1, outcomes[0]
    rates: dict[str, float] = json.loads(lines[0])["rates"]
    if rates["bytes_per_second"] >= _NO_LINK:
        raise TopologyError(
            "1 MiB took no longer than 64 bytes in an exchange of all ranks: this host is too busy to measure its "
            "links. Try again when it is quieter."
        )
    return rates
