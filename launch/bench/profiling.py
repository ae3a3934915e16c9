"""Where a layer spends its CPU time, by function."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cases import Batch
from measure import prepare
from methods import Method

CpuSeconds = Counter[str]
NUM_LINES = 15


def profile(method: Method, batch: Batch, num_runs: int, barrier: Callable[[], Any]) -> dict[str, CpuSeconds]:
    """CPU seconds of one run on this rank, forward and backward, by function and without its callees.

    The clock is CPU time: waiting for other ranks or for a busy machine is not in it. All of torch's own backward nodes
    are one line, "run_backward".
    """
    profilers = {"forward": cProfile.Profile(time.process_time), "backward": cProfile.Profile(time.process_time)}
    for _ in range(num_runs):
        tokens = prepare(method, batch)
        barrier()
        with profilers["forward"]:
            output = method.forward(tokens)
        with profilers["backward"]:
            output.backward(batch.upstream)
    return {part: _by_function(profiler, num_runs) for part, profiler in profilers.items()}


def to_text(name: str, ranks: Sequence[dict[str, CpuSeconds]]) -> str:
    """Summed over the ranks, the dearest functions first."""
    lines = []
    for part in ("forward", "backward"):
        seconds = sum((rank[part] for rank in ranks), Counter())
        total = sum(seconds.values())
        lines.append(f"{name} {part}: {1000 * total:.0f} ms of CPU time")
        lines += [f"{1000 * t:9.1f} ms {t / total:6.1%}  {where}" for where, t in seconds.most_common(NUM_LINES)]
    return "\n".join(lines)


def _by_function(profiler: cProfile.Profile, num_runs: int) -> CpuSeconds:
    seconds: CpuSeconds = Counter()
    for (file, line, function), (_, _, own_time, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        where = function if file == "~" else f"{Path(file).name}:{line} {function}"
        seconds[where] += own_time / num_runs
    return seconds
