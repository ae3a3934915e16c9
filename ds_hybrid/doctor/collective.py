"""Two ranks on this host start as in a run and sum up a tensor, under a time limit. Nothing of them stays behind."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Final, Literal

from ds_hybrid.doctor.facts import HostFacts, Lock
from ds_hybrid.doctor.locks import locks_held_by, remove_locks
from ds_hybrid.doctor.processes import Command, Outcome, run_together

NUM_RANKS: Final = 2
TIME_LIMIT: Final = 420.0
"""Seconds. On a CPU the ranks may first compile an op, which takes about a minute of a quiet machine."""

_FAILURE_GRACE = 5.0
_EXPECTED = "sum 3.0 to 3.0"  # the ranks give 1 and 2
_OP_ON_CPU = "deepspeed_shm_comm"


@dataclass(frozen=True)
class Collective:
    """What became of it.

    Attributes:
        result: ok, failed, or skipped.
        detail: which backend on which accelerator, and why it failed or was skipped.
    """

    result: Literal["ok", "failed", "skipped"]
    detail: str


def obstacle(host: HostFacts) -> str | None:
    """Why two ranks cannot run on this host, whatever else works; None when they can."""
    if host.failure is not None:
        return "torch or DeepSpeed does not load"
    if host.accelerator != "cpu" and len(host.devices) < NUM_RANKS:
        return f"needs {NUM_RANKS} devices, and this host has {len(host.devices)}"
    ops = {Path(lock.path).parent.name for lock in host.locks if not lock.is_held}
    if host.accelerator == "cpu" and _OP_ON_CPU in ops:
        return f"would wait without end for the lock of {_OP_ON_CPU}"
    return None


def run_collective(host: HostFacts, environment: Mapping[str, str], *, time_limit: float = TIME_LIMIT) -> Collective:
    """Run it on this host.

    Args:
        host: the facts of this host.
        environment: of the ranks, less what a launcher adds.
        time_limit: seconds.
    """
    if reason := obstacle(host):
        return Collective("skipped", reason)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    left: list[Lock] = []

    def note_locks(processes: Collection[int]) -> None:
        left.extend(locks_held_by(processes, host.lock_pattern))

    try:
        outcomes = run_together(
            [_rank(place, port, environment) for place in range(NUM_RANKS)],
            time_limit=time_limit,
            failure_grace=_FAILURE_GRACE,
            before_kill=note_locks,
        )
    finally:
        # DeepSpeed leaves 66 MiB of memory for each rank on a CPU, also after a good run.
        for path in glob(f"/dev/shm/deepspeed_allreduce_buffer_*_{port}_*"):
            os.unlink(path)
        remove_locks(left)
    detail = f"{NUM_RANKS} ranks on {host.accelerator}, {host.backend}"
    faults = _faults(outcomes, time_limit)
    return Collective("failed", f"{detail}: {'; '.join(faults)}") if faults else Collective("ok", detail)


def _rank(place: int, port: int, environment: Mapping[str, str]) -> Command:
    launcher = {
        "RANK": str(place),
        "LOCAL_RANK": str(place),
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return Command([sys.executable, "-m", "ds_hybrid.doctor.rank"], {"OMP_NUM_THREADS": "1", **environment, **launcher})


def _faults(outcomes: Sequence[Outcome], time_limit: float) -> list[str]:
    """What is wrong with the outcomes of the ranks: nothing, or what comes nearest to the cause."""
    failed, late, wrong = [], [], []
    for rank, outcome in enumerate(outcomes):
        sums = [line for line in outcome.output.splitlines() if line.startswith("sum ")]
        if outcome.code is None:
            late.append(f"rank {rank} was not done after {time_limit:.0f} seconds")
        elif outcome.code != 0:
            failed.append(f"rank {rank} ended with exit code {outcome.code}: {outcome.complaint or 'no word'}")
        elif sums != [_EXPECTED]:
            wrong.append(f"rank {rank} got {sums}, must be {[_EXPECTED]}")
    return failed or late or wrong
