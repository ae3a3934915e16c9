"""Real ranks for tests: processes that start once, join one gloo group, and then run functions sent to them.

The processes fork from a server that has imported torch and DeepSpeed once, which saves two seconds of CPU per rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_START_LIMIT = 120.0
_GRACE = 10.0


class RankFailureError(AssertionError):
    """Some rank raised; the message holds every rank's traceback."""


class RankPool:
    """``world_size`` processes, started at the first run and started anew after a run that left ranks stuck."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, limit: float = 120.0) -> list[Any]:
        """Call ``function(*args)`` on every rank and return the results in rank order.

        The function must be importable. A rank that is still busy after ``limit`` seconds prints its stack and dies.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, limit))
        answers = self._collect(limit + _GRACE)
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            raise RankFailureError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_GRACE)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["deepspeed", "transformers", "tests.ranks"])
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.world_size, port), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        assert self._collect(_START_LIMIT) == [(True, None)] * self.world_size

    def _collect(self, limit: float) -> list[tuple[bool, Any]]:
        deadline = time.monotonic() + limit
        answers: list[tuple[bool, Any] | None] = [None] * self.world_size
        stuck = False
        for rank, pipe in enumerate(self._pipes):
            with contextlib.suppress(EOFError):
                answers[rank] = pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else None
            if answers[rank] is None:
                stuck = True
                deadline = min(deadline, time.monotonic() + _GRACE)
            elif not answers[rank][0]:  # type: ignore[index]
                deadline = min(deadline, time.monotonic() + _GRACE)
        if stuck:
            self.close()
        return [answer or (False, "did not return: stuck or dead, its stack is on stderr") for answer in answers]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    import deepspeed
    import torch

    torch.set_num_threads(1)
    # Plain gloo: no JIT build, no lock, nothing in /dev/shm. The launcher's tests use DeepSpeed's shared-memory op.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", dist_init_required=True, verbose=False)
    pipe.send((True, None))
    while True:
        try:
            function, args, limit = pipe.recv()
        except EOFError:
            os._exit(0)
        faulthandler.dump_traceback_later(limit, exit=True)
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
