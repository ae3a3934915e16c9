"""Compares ways to compute attention over a sequence that ranks share, forward and backward.

    launch/run_local.sh 4 launch/bench/attention.py --length 2048 4096 8192 16384 --json attention.json
    torchrun --nproc_per_node 4 launch/bench/attention.py --length 4096 --kv-heads 1 --methods full ulysses ring

Each is first compared with full attention on one rank: output, and gradients of queries, keys and values. One that
differs, or does not take the sizes, is reported and not timed. The others run in turn, each once a round; ratios are
medians over rounds. CPU time is summed over the ranks. Peak memory is that of the worst rank, and is fitted as a line
in the length. On a busy CPU only CPU time, bytes and memory mean something.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed.comm as dist
import numpy as np
import torch
from attention_methods import DESCRIPTIONS, FULL, TOLERANCES, Case, Contender, build, lone_group
from cases import Batch, relative_error
from measure import Memory, Seconds, exchanges_of, memory_of, run_once, time_once
from ranks import attempt, gathered, run_on_ranks

from ds_hybrid.dispatch.collectives import RankGroup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Options:
    """The command line."""

    length: list[int]
    heads: int
    kv_heads: int
    head_dim: int
    bidirectional: bool
    rounds: int
    methods: list[str]
    dtype: str
    json: Path | None


@dataclass(frozen=True)
class Result:
    """One method at one length, over all ranks.

    Attributes:
        reason: why it was not timed.
        error: largest difference from full attention over its largest value, of output and gradients.
        forward_bytes, backward_bytes: that left a rank for others, of all ranks together.
        saved_bytes, peak_bytes: see ``measure.Memory``, of the worst rank.
        cpu_seconds: for each round, forward and backward, the sum over the ranks.
        wall_seconds: the same, the slowest rank.
    """

    length: int
    method: str
    reason: str | None = None
    error: float | None = None
    forward_bytes: int | None = None
    backward_bytes: int | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    cpu_seconds: tuple[float, ...] = ()
    wall_seconds: tuple[float, ...] = ()


def parse_options(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", nargs="+", type=int, default=[2048, 4096, 8192, 16384], help="(%(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="of queries (%(default)s)")
    parser.add_argument("--kv-heads", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--head-dim", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--bidirectional", action="store_true", help="no causal mask")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each method (%(default)s)")
    parser.add_argument("--methods", nargs="+", choices=DESCRIPTIONS, default=list(DESCRIPTIONS))
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    options = vars(parser.parse_args(arguments))
    # The deepspeed launcher passes it; the environment tells the same under every launcher.
    del options["local_rank"]
    return Options(**options)


def main() -> int:
    """Returns the exit code."""
    options = parse_options()
    return run_on_ranks("attention.py", partial(run, options))


def run(options: Options, device: torch.device, environment: dict[str, Any]) -> None:
    """Measures every length, and shows after each what is known by then."""
    group = lone_group()
    results: list[Result] = []
    for length in options.length:
        case = Case(length, options.heads, options.kv_heads, options.head_dim, not options.bidirectional)
        results += run_case(case, options, group, device)
        if dist.get_rank() == 0:
            show(results, environment, options)


def run_case(case: Case, options: Options, group: RankGroup, device: torch.device) -> list[Result]:
    """Builds and compares, then measures, then times. All ranks see the same methods fail."""
    whole = case.whole(device, DTYPES[options.dtype])
    right = full_attention(case, whole, group)
    results: dict[str, Result] = {}
    contenders: dict[str, Contender] = {}
    for name in options.methods:
        contender = attempt(partial(build, name, case, whole, group))
        error = contender if isinstance(contender, str) else attempt(partial(compare, contender, right))
        limit = TOLERANCES.get(name, TOLERANCE[options.dtype])
        if isinstance(error, str) or isinstance(contender, str):
            results[name] = Result(case.length, name, str(error))
        elif max(gathered(error)) > limit:
            worst = max(gathered(error))
            results[name] = Result(case.length, name, f"off by {worst:.1e}, at most {limit:.0e} is allowed", worst)
        else:
            contenders[name] = contender
            results[name] = measure(case, contender, max(gathered(error)))
    del whole, right
    for name, (cpu, wall) in time_all(contenders, options.rounds).items():
        results[name] = Result(**{**asdict(results[name]), "cpu_seconds": cpu, "wall_seconds": wall})
    return list(results.values())


def full_attention(case: Case, whole: Batch, group: RankGroup) -> Batch:
    """Output and gradients of the whole sequence, computed on rank 0 and sent to all."""
    found = run_once(build(FULL, case, whole, group).method, whole) if group.rank == 0 else None
    output, gradient = found or (torch.empty_like(whole.upstream), torch.empty_like(whole.tokens))
    for tensor in (output, gradient):
        dist.broadcast(tensor.detach(), 0)
    return Batch(gradient, output.detach())


def compare(contender: Contender, right: Batch) -> float:
    """The largest error on this rank, of the output and of each kind of gradient."""
    output, gradient = run_once(contender.method, contender.batch)
    if not len(contender.index):
        return 0.0
    index = contender.index.to(output.device)
    return max(relative_error(output, right.upstream[index].cpu()), relative_error(gradient, right.tokens[index].cpu()))


def measure(case: Case, contender: Contender, error: float) -> Result:
    """Bytes and memory."""
    sent = [sum(exchange.sent for exchange in half) for half in exchanges_of(contender.method, contender.batch)]
    forward, backward = np.sum(gathered(sent), axis=0)
    memories: list[Memory] = gathered(memory_of(contender.method, contender.batch))
    peaks = [memory.peak for memory in memories if memory.peak is not None]
    return Result(
        case.length,
        contender.method.name,
        error=error,
        forward_bytes=int(forward),
        backward_bytes=int(backward),
        saved_bytes=max(memory.saved for memory in memories),
        peak_bytes=max(peaks) if peaks else None,
    )


def time_all(
    contenders: dict[str, Contender], num_rounds: int
) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """Each once a round; the one that starts moves on by one each round. CPU and wall seconds of each round."""
    rounds: dict[str, list[Seconds]] = {name: [] for name in contenders}
    names = list(contenders)
    gc.collect()
    gc.disable()
    for start in range(num_rounds):
        turn = start % max(len(names), 1)
        for name in (*names[turn:], *names[:turn]):
            rounds[name].append(time_once(contenders[name].method, contenders[name].batch))
    gc.enable()
    found = {}
    for name, mine in rounds.items():
        of_ranks = list(zip(*gathered(mine), strict=True))
        cpu = tuple(sum(rank.cpu_forward + rank.cpu_backward for rank in ranks) for ranks in of_ranks)
        found[name] = cpu, tuple(max(rank.wall_forward + rank.wall_backward for rank in ranks) for ranks in of_ranks)
    return found


def line_fit(lengths: Sequence[int], values: Sequence[float]) -> tuple[float, float, float]:
    """Least squares: value at length 0, slope per token, and the exponent of the growth from first to last length."""
    slope, start = np.polyfit(lengths, values, 1)
    exponent = np.log(values[-1] / values[0]) / np.log(lengths[-1] / lengths[0])
    return float(start), float(slope), float(exponent)


def show(results: Sequence[Result], environment: dict[str, Any], options: Options) -> None:
    """After every length, so that a run that is ended early has told what it knows."""
    if options.json is not None:
        content = {
            "settings": environment,
            "options": {name: value for name, value in vars(options).items() if name != "json"},
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    length = results[-1].length
    print(to_markdown([result for result in results if result.length == length]), flush=True)
    if length == options.length[-1] and len(options.length) > 2:
        print(fits(results), flush=True)


def to_markdown(results: Sequence[Result]) -> str:
    """One length. MB are 10^6 bytes."""
    full = next((result for result in results if result.method == FULL and result.cpu_seconds), None)
    lines = [
        f"### {results[0].length} tokens",
        "",
        "| method | CPU s | / full | wall s | forward MB | backward MB | saved MB | peak MB | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        if not result.cpu_seconds:
            lines.append(f"| `{result.method}` | not timed: {result.reason} ||||||||")
            continue
        ratios = zip(result.cpu_seconds, full.cpu_seconds, strict=True) if full is not None else ()
        ratio = [mine / whole for mine, whole in ratios]
        cells = [
            f"{median(result.cpu_seconds):.2f}",
            f"{median(ratio):.2f}" if ratio else "-",
            f"{median(result.wall_seconds):.2f}",
            *(
                "-" if number is None else f"{number / 1e6:.1f}"
                for number in (result.forward_bytes, result.backward_bytes, result.saved_bytes, result.peak_bytes)
            ),
            f"{result.error:.0e}",
        ]
        lines.append(f"| `{result.method}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def fits(results: Sequence[Result]) -> str:
    """The peak of each method as a line in the length."""
    lines = ["| method | peak MB at 0 | bytes a token | growth: length to the power of |", "|---|---|---|---|"]
    for method in dict.fromkeys(result.method for result in results):
        measured = [(r.length, r.peak_bytes) for r in results if r.method == method and r.peak_bytes]
        if len(measured) > 2:
            start, slope, exponent = line_fit(*zip(*measured, strict=True))
            lines.append(f"| `{method}` | {start / 1e6:.1f} | {slope:.0f} | {exponent:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
