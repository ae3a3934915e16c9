"""What it costs to be observed: steps of runs that write down more and more beside steps of one that writes nothing.

    launch/run_local.sh 4 launch/bench/observe.py --json observe.json
    torchrun --nproc_per_node 8 launch/bench/observe.py --interval 10

Engines with the same weights train in the same processes on the same batches, step by step in turn: `off`, `again` (the
same once more: how much equals differ), one each for the events alone, with the timelines, and with the routing trace,
and `all` with everything. Ratios are medians over the intervals of the ratio to `off` in the same interval; where
chance could have made one, it says so. Function calls are counted: they are the same on a busy machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from observe_costs import CPU, INSIDE_CPU, INSIDE_WALL, NUM_MEASURES, WALL, Calls, Costs, costs_of, to_markdown
from ranks import gathered, run_on_ranks
from small_model import VOCABULARY, Sizes, add_sizes, build_engine

from ds_hybrid.cli.arguments import count

ENGINES: dict[str, dict[str, bool] | None] = {
    "off": None,
    "again": None,
    "events": {"timeline": False, "routing_trace": False},
    "timeline": {"timeline": True, "routing_trace": False},
    "trace": {"timeline": False, "routing_trace": True},
    "all": {"timeline": True, "routing_trace": True},
}
"""What each writes: nothing, or events and these."""


@dataclass(frozen=True)
class Options(Sizes):
    """The command line."""

    steps: int
    interval: int
    seconds: float
    json: Path | None


def parse_options(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=count, default=100, help="of each engine, rounded up to whole intervals (%(default)s)")
    add("--interval", type=count, default=10, help="steps between two records (%(default)s)")
    add("--seconds", type=float, default=420, help="end before that, with fewer steps (%(default)s)")
    add_sizes(parser, hidden=256)
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    options = vars(parser.parse_args(arguments))
    # The deepspeed launcher passes it; the environment tells the same under every launcher.
    del options["local_rank"]
    return Options(**options)


def main() -> int:
    """Returns the exit code."""
    options = parse_options()
    return run_on_ranks("observe.py", lambda _device, environment: run(options, environment))


def run(options: Options, environment: dict[str, Any]) -> None:
    """Trains the engines side by side, and prints a table on rank 0."""
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as own_folder:
        folder = Path(gathered(own_folder)[0])  # of rank 0, which writes
        engines = {name: make_engine(options, name, folder) for name in ENGINES}
        calls = warm_up(engines, options)
        samples = train(engines, options, end)
        dist.barrier()
        num_bytes = {name: file_bytes(folder / name) for name in ENGINES}
    if dist.get_rank() == 0:
        measured = np.array(samples)  # [S, R, engines, measures]
        costs = {name: costs_of(measured, number, options.interval, calls[name]) for number, name in enumerate(ENGINES)}
        num_intervals = len(measured) // options.interval
        print(", ".join(f"{name} {value}" for name, value in environment.items()))
        print(f"{dist.get_world_size()} ranks, a record every {options.interval} steps, {num_intervals} intervals\n")
        print(to_markdown(costs))
        if options.json is not None:
            options.json.write_text(to_json(options, environment, num_intervals, costs, num_bytes))


def to_json(
    options: Options,
    environment: dict[str, Any],
    num_intervals: int,
    costs: dict[str, Costs],
    num_bytes: dict[str, dict[str, int]],
) -> str:
    found = {
        "settings": environment,
        "options": asdict(options) | {"json": None},
        "num_intervals": num_intervals,
        "costs": {name: asdict(each) for name, each in costs.items()},
        "file_bytes": num_bytes,
    }
    return json.dumps(found, indent=1) + "\n"


def make_engine(options: Options, name: str, folder: Path) -> Any:
    """An engine that writes down in ``folder / name`` what :data:`ENGINES` says; the same weights each time."""
    writes = ENGINES[name]
    directory = None if writes is None else str(folder / name)
    document = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "ds_hybrid": {
            "dispatch": {"mode": "two_stage"},
            "observe": {"directory": directory, "interval": options.interval, **(writes or {})},
        },
    }
    return build_engine(options, document)


def warm_up(engines: dict[str, Any], options: Options) -> dict[str, Calls]:
    """Train whole intervals, of three steps at least; the calls in the last two steps, of each engine."""
    calls: dict[str, list[int]] = {name: [] for name in engines}
    for step in range(options.interval * math.ceil(3 / options.interval)):
        ids = batch(options, step)
        for name, engine in engines.items():
            with counted_calls() as num_calls, without_garbage_collection():
                one_step(engine, ids.to(engine.device))
            calls[name].append(num_calls[0])
    return {name: Calls(record=of_steps[-1], other=of_steps[-2]) for name, of_steps in calls.items()}


def train(engines: dict[str, Any], options: Options, end: float) -> list[Any]:
    """[S][R][engines][measures] seconds of whole intervals: of all steps, or those that are over before ``end``."""
    samples: list[Any] = []
    names = list(engines)
    while len(samples) < options.steps:
        began = time.monotonic()
        for step in range(len(samples), len(samples) + options.interval):
            turn = first_engine(step, options.interval)
            of_engine = {name: timed_step(engines[name], options, step) for name in (*names[turn:], *names[:turn])}
            samples.append(gathered([of_engine[name] for name in names]))
        now = time.monotonic()
        if gathered(2 * now - began > end)[0]:  # rank 0 decides whether there is time for another one
            break
    return samples


def first_engine(step: int, interval: int) -> int:
    """Which engine begins a step: another in each step of an interval, and in the recorded steps of all intervals."""
    return (step % interval + step // interval) % len(ENGINES)


def timed_step(engine: Any, options: Options, step: int) -> list[float]:
    """Seconds of one optimizer step from a barrier on: of the whole, and of what the observer does after it."""
    measures = [0.0] * NUM_MEASURES
    after_step = engine._observer.after_step

    def timed(*arguments: Any) -> None:
        get_accelerator().synchronize()
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        after_step(*arguments)
        measures[INSIDE_WALL], measures[INSIDE_CPU] = time.perf_counter() - wall, time.process_time() - cpu

    ids = batch(options, step).to(engine.device)
    engine._observer.after_step = timed
    with without_garbage_collection():
        get_accelerator().synchronize()
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        one_step(engine, ids)
        get_accelerator().synchronize()
        measures[WALL], measures[CPU] = time.perf_counter() - wall, time.process_time() - cpu
    del engine._observer.after_step
    return measures


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Calls of functions, Python's and others, that this thread makes; the one item of the list."""
    found = [0]

    def note(_frame: Any, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            found[0] += 1

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def one_step(engine: Any, ids: torch.Tensor) -> None:
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    engine.step()


def batch(options: Options, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(VOCABULARY, (options.batch, options.seq_len), generator=generator)


def file_bytes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


if __name__ == "__main__":
    sys.exit(main())
