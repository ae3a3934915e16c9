"""What the benchmark found: summed over ranks, as medians of per-round ratios, as JSON and as Markdown."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from statistics import median
from typing import Any, Literal

import torch
from cases import Case
from measure import Exchange, Memory, Seconds
from methods import BASELINE, DEEPSPEED_MOE, DESCRIPTIONS
from torch import Tensor

Status = Literal["right", "timed", "wrong", "skipped"]
Part = Literal["forward", "backward", "total"]
PARTS: tuple[Part, ...] = ("forward", "backward", "total")


@dataclass(frozen=True)
class Costs:
    """What one forward and backward of a method costs on one rank, time apart. ``meter_bytes``: by its own count."""

    forward_exchanges: tuple[Exchange, ...]
    backward_exchanges: tuple[Exchange, ...]
    meter_bytes: int | None
    memory: Memory


@dataclass(frozen=True)
class MethodResult:
    """One method in one case, over all ranks.

    Attributes:
        status: ``timed``, or ``wrong`` or ``skipped`` with a ``reason``; ``right`` on the way to ``timed``.
        output_error: largest difference from the reference over its largest value, on the worst rank.
        wire_bytes: that left a rank for others in one forward and backward, metadata included.
        meter_bytes: the same by the layer's own count.
        receiver_max_over_mean: in the forward collective that brings some rank the most bytes, those over the mean.
        saved_bytes, peak_bytes: see ``measure.Memory``, of the worst rank.
        cpu_seconds: for each part and round, the sum over the ranks.
        wall_seconds: for each part and round, the slowest rank.
        cpu_ratio, wall_ratio: median over the rounds of the ratio to AutoEP in the same round, by part.
        cpu_ratio_to_deepspeed_moe, wall_ratio_to_deepspeed_moe: the same, of the total, to DeepSpeed's MoE.
    """

    name: str
    status: Status
    reason: str | None = None
    output_error: float | None = None
    input_grad_error: float | None = None
    wire_bytes: int | None = None
    wire_over_lower_bound: float | None = None
    meter_bytes: int | None = None
    num_collectives: int | None = None
    receiver_max_over_mean: float | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    cpu_seconds: dict[Part, list[float]] | None = None
    wall_seconds: dict[Part, list[float]] | None = None
    cpu_ratio: dict[Part, float] | None = None
    wall_ratio: dict[Part, float] | None = None
    cpu_ratio_to_deepspeed_moe: float | None = None
    wall_ratio_to_deepspeed_moe: float | None = None


@dataclass(frozen=True)
class CaseResult:
    """All methods in one case. ``expert_load`` and ``rank_load`` are the busiest over the mean."""

    case: Case
    dtype: str
    num_rounds: int
    expert_load: float
    rank_load: float
    lower_bound_bytes: int
    methods: tuple[MethodResult, ...]


def settings(device: torch.device, backend: str) -> dict[str, Any]:
    """Versions and machine, without names of hosts."""
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "deepspeed", "ds_hybrid")},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "backend": backend,
    }


def summarize(
    result: MethodResult, costs: Sequence[Costs], rounds: Sequence[Sequence[Seconds]], lower_bound_bytes: int
) -> MethodResult:
    """Adds what was measured on each rank; the ratios come with :func:`with_ratios`."""
    wire_bytes = sum(exchange.sent for rank in costs for exchange in rank.forward_exchanges + rank.backward_exchanges)
    peaks = [rank.memory.peak for rank in costs if rank.memory.peak is not None]
    meters = [rank.meter_bytes for rank in costs if rank.meter_bytes is not None]
    return replace(
        result,
        status="timed",
        wire_bytes=wire_bytes,
        wire_over_lower_bound=wire_bytes / lower_bound_bytes if lower_bound_bytes else None,
        meter_bytes=sum(meters) if meters else None,
        num_collectives=len(costs[0].forward_exchanges + costs[0].backward_exchanges),
        receiver_max_over_mean=largest_receiver([rank.forward_exchanges for rank in costs]),
        saved_bytes=max(rank.memory.saved for rank in costs),
        peak_bytes=max(peaks) if peaks else None,
        cpu_seconds=_by_part([_sum_of_ranks(seconds) for seconds in zip(*rounds, strict=True)]),
        wall_seconds=_by_part([_slowest_rank(seconds) for seconds in zip(*rounds, strict=True)]),
    )


def with_ratios(methods: Sequence[MethodResult]) -> tuple[MethodResult, ...]:
    """Adds the ratios to AutoEP and to DeepSpeed's MoE, where those were timed."""
    timed = {method.name: method for method in methods if method.status == "timed"}
    baseline, moe = timed.get(BASELINE), timed.get(DEEPSPEED_MOE)
    results = []
    for method in methods:
        extra: dict[str, Any] = {}
        if method.status == "timed" and baseline is not None:
            extra["cpu_ratio"] = _ratios(method.cpu_seconds, baseline.cpu_seconds)
            extra["wall_ratio"] = _ratios(method.wall_seconds, baseline.wall_seconds)
        if method.status == "timed" and moe is not None:
            extra["cpu_ratio_to_deepspeed_moe"] = _ratios(method.cpu_seconds, moe.cpu_seconds)["total"]
            extra["wall_ratio_to_deepspeed_moe"] = _ratios(method.wall_seconds, moe.wall_seconds)["total"]
        results.append(replace(method, **extra))
    return tuple(results)


def largest_receiver(exchanges_of_rank: Sequence[Sequence[Exchange]]) -> float | None:
    """Of the collective that brings some rank the most bytes: those over the mean of the ranks."""
    if len({len(exchanges) for exchanges in exchanges_of_rank}) > 1:
        return None
    by_collective = [[exchange.received for exchange in same] for same in zip(*exchanges_of_rank, strict=True)]
    received = max(by_collective, key=max, default=[0])
    return max(received) * len(received) / sum(received) if any(received) else None


def max_over_mean(counts: Tensor) -> float:
    """The largest of [N] counts over their mean."""
    return float(counts.max() / counts.double().mean())


def to_json(results: Sequence[CaseResult], environment: dict[str, Any]) -> dict[str, Any]:
    return {"settings": environment, "cases": [asdict(result) for result in results]}


def to_markdown(results: Sequence[CaseResult], environment: dict[str, Any]) -> str:
    """One table a case. MB are 10^6 bytes."""
    lines = [", ".join(f"{name} {value}" for name, value in environment.items())]
    for result in results:
        lines += ["", *_table(result)]
    return "\n".join(lines) + "\n"


_HEADER = (
    "| method | CPU forward | CPU backward | CPU | wall | CPU ms | CPU / DeepSpeed MoE | wire MB | x lower bound "
    "| saved MB | peak MB | receiver |"
)


def _table(result: CaseResult) -> list[str]:
    return [
        f"### {result.case}",
        "",
        f"{result.dtype}, {result.num_rounds} rounds; busiest expert {result.expert_load:.2f} and busiest rank "
        f"{result.rank_load:.2f} times the mean; lower bound {result.lower_bound_bytes / 1e6:.2f} MB",
        "",
        _HEADER,
        "|---" * (_HEADER.count("|") - 1) + "|",
        *(_row(method) for method in result.methods if method.status == "timed"),
        *(
            f"\n`{method.name}` ({DESCRIPTIONS.get(method.name, 'ds_hybrid')}) was not timed, {method.status}: "
            f"{method.reason}"
            for method in result.methods
            if method.status != "timed"
        ),
    ]


def _row(method: MethodResult) -> str:
    assert method.cpu_seconds is not None
    cpu = method.cpu_ratio or dict.fromkeys(PARTS)
    wall = method.wall_ratio or dict.fromkeys(PARTS)
    cells = [
        f"`{method.name}`",
        *(_number(cpu[part], 3) for part in PARTS),
        _number(wall["total"], 2),
        _number(1000 * median(method.cpu_seconds["total"]), 0),
        _number(method.cpu_ratio_to_deepspeed_moe, 3),
        _number(method.wire_bytes, 2, 1e6),
        _number(method.wire_over_lower_bound, 3),
        _number(method.saved_bytes, 1, 1e6),
        _number(method.peak_bytes, 1, 1e6),
        _number(method.receiver_max_over_mean, 2),
    ]
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, digits: int, unit: float = 1) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _sum_of_ranks(ranks: Sequence[Seconds]) -> tuple[float, float]:
    return sum(rank.cpu_forward for rank in ranks), sum(rank.cpu_backward for rank in ranks)


def _slowest_rank(ranks: Sequence[Seconds]) -> tuple[float, float]:
    """Ranks wait for each other, so the slowest sum is split as that rank split it."""
    slowest = max(ranks, key=lambda rank: rank.wall_forward + rank.wall_backward)
    return slowest.wall_forward, slowest.wall_backward


def _by_part(rounds: Sequence[tuple[float, float]]) -> dict[Part, list[float]]:
    return {
        "forward": [forward for forward, _ in rounds],
        "backward": [backward for _, backward in rounds],
        "total": [forward + backward for forward, backward in rounds],
    }


def _ratios(method: dict[Part, list[float]] | None, other: dict[Part, list[float]] | None) -> dict[Part, float]:
    assert method is not None
    assert other is not None
    return {part: median(a / b for a, b in zip(method[part], other[part], strict=True)) for part in PARTS}
