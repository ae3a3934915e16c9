"""What it costs to be observed: steps of a run that writes everything down beside steps of runs that write nothing.

    launch/run_local.sh 4 launch/bench/observe.py --steps 100 --json observe.json
    torchrun --nproc_per_node 8 launch/bench/observe.py --interval 10

Three engines with the same weights train in the same processes on the same batches, step by step in turn: `off`,
`again` (the same once more: how much equals differ), and `observed` with events, timelines and routing trace. Ratios
are medians over the intervals of the ratio to `off` in the same interval. Besides, the time inside the observer at each
record is measured on the slowest rank, from a barrier on.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import numpy as np
import numpy.typing as npt
import torch
from deepspeed.accelerator import get_accelerator
from ranks import gathered, run_on_ranks
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import ds_hybrid
from ds_hybrid.cli.arguments import count

ENGINES = ("off", "again", "observed")
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Options:
    """The command line. Sizes of a batch are of each rank."""

    steps: int
    interval: int
    ep: int | None
    experts: int
    layers: int
    hidden: int
    width: int
    batch: int
    seq_len: int
    json: Path | None


@dataclass(frozen=True)
class Costs:
    """Of one engine against `off`.

    Attributes:
        step_ms: median over steps of the slowest rank.
        wall_ratio, cpu_ratio: medians over intervals, of the slowest rank's wall time and all ranks' CPU time.
        between_ratio: of CPU time, without the last step of each interval, the one that is recorded.
        record_ms: median over records of the time inside the observer, on the slowest rank; 0 without one.
        record_of_interval: that over the time of an interval's steps.
        other_ms: median over the other steps of the time inside the observer when they end.
    """

    step_ms: float
    wall_ratio: float
    cpu_ratio: float
    between_ratio: float
    record_ms: float
    record_of_interval: float
    other_ms: float


def parse_options(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=count, default=100, help="of each engine, after one interval to warm up (%(default)s)")
    add("--interval", type=count, default=10, help="steps between two records (%(default)s)")
    add("--ep", type=count, help="size of the expert-parallel groups (the number of ranks)")
    add("--experts", type=count, default=32, help="of a layer (%(default)s)")
    add("--layers", type=count, default=4, help="(%(default)s)")
    add("--hidden", type=count, default=256, help="size of a token (%(default)s)")
    add("--width", type=count, default=256, help="of an expert (%(default)s)")
    add("--batch", type=count, default=4, help="sequences of a rank (%(default)s)")
    add("--seq-len", type=count, default=128, help="tokens (%(default)s)")
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
    num_steps = (options.steps // options.interval + 1) * options.interval
    samples: list[Sequence[Any]] = []
    with tempfile.TemporaryDirectory() as own_folder:
        folder = gathered(own_folder)[0]  # of rank 0, which writes
        engines = {name: make_engine(options, Path(folder) if name == "observed" else None) for name in ENGINES}
        for step in range(num_steps):
            turn = step % len(ENGINES)
            of_engine = {name: train_step(engines[name], options, step) for name in ENGINES[turn:] + ENGINES[:turn]}
            samples.append(gathered([of_engine[name] for name in ENGINES]))
        num_bytes = {path.name: path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()}
        dist.barrier()
    if dist.get_rank() == 0:
        measured = np.array(samples)[options.interval :]  # [S, R, engines, (wall, cpu, inside the observer)]
        costs = {name: costs_of(measured, number, options.interval) for number, name in enumerate(ENGINES)}
        print(", ".join(f"{name} {value}" for name, value in environment.items()) + "\n\n" + to_markdown(costs))
        if options.json is not None:
            found = {
                "settings": environment,
                "options": asdict(options) | {"json": None},
                "costs": {name: asdict(each) for name, each in costs.items()},
                "file_bytes": num_bytes,
            }
            options.json.write_text(json.dumps(found, indent=1) + "\n")


def make_engine(options: Options, folder: Path | None) -> Any:
    """An engine that writes down everything in ``folder``, or nothing; the same weights each time."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=max(options.hidden // 4, 8),
        moe_intermediate_size=options.width,
        num_experts=options.experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=options.seq_len,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    observe = {
        "directory": None if folder is None else str(folder),
        "interval": options.interval,
        "routing_trace": folder is not None,
    }
    document = {
        "train_micro_batch_size_per_gpu": options.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "expert_parallel": {"enabled": True, "autoep_size": options.ep or dist.get_world_size()},
        "ds_hybrid": {"dispatch": {"mode": "two_stage"}, "observe": observe},
        "steps_per_print": 10**9,
    }
    return ds_hybrid.initialize(model=model, model_parameters=model.parameters(), config=document)[0]


def train_step(engine: Any, options: Options, step: int) -> tuple[float, float, float]:
    """Seconds of one optimizer step between two barriers: wall and CPU time, and the time inside the observer."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    ids = torch.randint(256, (options.batch, options.seq_len), generator=generator).to(engine.device)
    inside = 0.0
    after_step = engine._observer.after_step

    def timed(*arguments: Any) -> None:
        nonlocal inside
        get_accelerator().synchronize()
        dist.barrier()
        began = time.perf_counter()
        after_step(*arguments)
        inside = time.perf_counter() - began

    engine._observer.after_step = timed
    gc.disable()
    get_accelerator().synchronize()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    engine.step()
    get_accelerator().synchronize()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    gc.enable()
    del engine._observer.after_step
    return wall, cpu, inside


def costs_of(measured: FloatArray, number: int, interval: int) -> Costs:
    """Of one engine, from [S, R, engines, (wall, CPU, inside the observer)] seconds; S are whole intervals."""
    wall, cpu = measured[..., 0].max(1), measured[..., 1].sum(1)  # [S, engines]
    inside = measured[:, :, number, 2].max(1)
    blocks = [each.reshape(-1, interval, each.shape[1]) for each in (wall, cpu)]
    wall_ratio, cpu_ratio = (_median_ratio(block, number) for block in blocks)
    is_record = np.arange(len(inside)) % interval == interval - 1
    is_observed = number == ENGINES.index("observed")
    records, others = (inside[which] if is_observed else np.zeros(1) for which in (is_record, ~is_record))
    interval_seconds = float(np.median(blocks[0].sum(1)[:, 0]))
    return Costs(
        step_ms=1e3 * float(np.median(wall[:, number])),
        wall_ratio=wall_ratio,
        cpu_ratio=cpu_ratio,
        between_ratio=_median_ratio(blocks[1][:, :-1], number) if interval > 1 else float("nan"),
        record_ms=1e3 * float(np.median(records)),
        record_of_interval=float(np.median(records)) / interval_seconds,
        other_ms=1e3 * float(np.median(others)) if interval > 1 else float("nan"),
    )


def _median_ratio(blocks: FloatArray, number: int) -> float:
    sums = blocks.sum(1)
    return float(np.median(sums[:, number] / sums[:, 0]))


def to_markdown(costs: dict[str, Costs]) -> str:
    """One row for each engine."""
    lines = [
        "| engine | step ms | wall | CPU | CPU between records | record ms | record / interval | other ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {each.step_ms:.1f} | {each.wall_ratio:.3f} | {each.cpu_ratio:.3f} | {each.between_ratio:.3f} "
        f"| {each.record_ms:.2f} | {each.record_of_interval:.2%} | {each.other_ms:.3f} |"
        for name, each in costs.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
