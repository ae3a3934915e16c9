"""Layouts of one small model in the order that the planner predicts, against the order in which they really run.

    ds_hybrid calibrate --num-ranks 4 --dtype float32 --write mine.yaml
    launch/run_local.sh 4 launch/bench/layouts.py --cluster mine.yaml

All layouts train in one process group, one step of each in turn, the first one moving on each round. A step's time is
that of the slowest rank, from a barrier on; CPU time is summed over the ranks. Both are medians over the rounds. The
planner is told what was routed. Prints a table in Markdown, and how well the orders agree.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed.comm as dist
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from ranks import run_on_ranks
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import ds_hybrid
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.ds_config import to_ds_config
from ds_hybrid.plan.machine import read_machine
from ds_hybrid.plan.model import ModelShape
from ds_hybrid.plan.model_file import model_from_config
from ds_hybrid.plan.routing import RoutingLaw
from ds_hybrid.plan.search import Estimator, Request

MODEL = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    moe_intermediate_size=256,
    num_experts=64,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    max_position_embeddings=4096,
)
WORK = Workload(seq_len=128, micro_batch=2, value_bytes=4, attention="fused")


@dataclass(frozen=True)
class Row:
    """A layout: what was predicted and what was measured, in seconds of a step."""

    name: str
    predicted: float
    wall: float
    cpu: float


@dataclass(frozen=True)
class Agreement:
    """How well predictions go with measurements: Spearman's rank correlation, and the predicted over the measured."""

    wall_correlation: float
    cpu_correlation: float
    ratios: tuple[float, ...]


def candidates(world_size: int) -> list[Candidate]:
    """Layouts that differ in what the planner varies. Not in tensor parallelism, whose size a process cannot change."""
    half = max(1, world_size // 2)
    chosen = [
        Candidate(world_size, 1, 1, 0, "allgather"),
        Candidate(world_size, 1, 1, 1, "allgather"),
        Candidate(world_size, 1, half, 1, "two_stage"),
        Candidate(world_size, 1, world_size, 1, "two_stage"),
        Candidate(world_size, 1, world_size, 1, "allgather"),
        Candidate(world_size, 1, world_size, 1, "alltoall"),
        Candidate(world_size, 1, world_size, 1, "two_stage", checkpoints=True),
        Candidate(world_size, 1, world_size, 3, "two_stage"),
    ]
    return list(dict.fromkeys(chosen))


def name_of(candidate: Candidate) -> str:
    checkpoints = ", checkpoints" if candidate.checkpoints else ""
    mode = candidate.mode if candidate.ep_size > 1 else "nothing dispatched"
    return f"EP {candidate.ep_size}, ZeRO {candidate.zero_stage}, {mode}{checkpoints}"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", required=True, metavar="FILE", help="what ds_hybrid calibrate wrote")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return run_on_ranks("layouts.py", lambda _device, _environment: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Trains all layouts side by side, and prints how well their order was predicted."""
    machine = read_machine(arguments.cluster)
    shape = model_from_config(MODEL.to_dict(), label="bench", file="bench")
    layouts = candidates(dist.get_world_size())
    engines = [build(candidate, shape) for candidate in layouts]
    wall, cpu = measure(engines, arguments.rounds)
    law = routed(engines, shape)
    if dist.get_rank() == 0:
        estimate = Estimator(Request(shape, WORK, machine, machine.cluster(dist.get_world_size()), law))
        rows = [
            Row(name_of(candidate), estimate(candidate).time.total, *seconds)
            for candidate, *seconds in zip(layouts, wall, cpu, strict=True)
        ]
        print(to_markdown(rows, agreement(rows)))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2), encoding="utf-8")
    dist.barrier()


def build(candidate: Candidate, shape: ModelShape) -> Any:
    """An engine that trains so; all have the same weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODEL, dtype=torch.float32)
    if candidate.checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = to_ds_config(shape, WORK, candidate)
    return ds_hybrid.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def measure(engines: list[Any], num_rounds: int) -> tuple[list[float], list[float]]:
    """Medians over rounds, by engine: seconds of a step, and CPU seconds of all ranks."""
    times: list[list[tuple[float, float]]] = [[] for _ in engines]
    for round_number in range(-2, num_rounds):  # two to warm up
        for turn in range(len(engines)):
            place = (turn + round_number) % len(engines)
            seconds = torch.tensor(step(engines[place], round_number), dtype=torch.float64)
            slowest = seconds.clone()
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            dist.all_reduce(seconds)
            if round_number >= 0:
                times[place].append((float(slowest[0]), float(seconds[1])))
    return [median(wall for wall, _ in one) for one in times], [median(cpu for _, cpu in one) for one in times]


def step(engine: Any, seed: int) -> tuple[float, float]:
    """Wall and CPU seconds of one step of this rank."""
    generator = torch.Generator().manual_seed(1000 * (seed + 2) + dist.get_rank())
    ids = torch.randint(0, MODEL.vocab_size, (WORK.micro_batch, WORK.seq_len + 1), generator=generator)
    ids = ids.to(engine.device)
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    logits = engine(input_ids=ids[:, :-1], use_cache=False).logits
    engine.backward(cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()))
    engine.step()
    get_accelerator().synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def routed(engines: list[Any], shape: ModelShape) -> RoutingLaw:
    """What the layers of one engine routed, over all ranks: [layers, E] as shares of a token's choices."""
    stats = engines[0].moe_stats()
    loads = np.array([layer.expert_load for layer in stats.layers], dtype=np.float64)
    return RoutingLaw("as measured", shape.top_k * loads / loads.sum(1, keepdims=True), shape.num_moe_layers)


def agreement(rows: list[Row]) -> Agreement:
    predicted = [row.predicted for row in rows]
    return Agreement(
        wall_correlation=rank_correlation(predicted, [row.wall for row in rows]),
        cpu_correlation=rank_correlation(predicted, [row.cpu for row in rows]),
        ratios=tuple(row.predicted / row.wall for row in rows),
    )


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's: the correlation of places in the two orders; equals share the mean of their places."""
    return float(np.corrcoef(_places(first), _places(second))[0, 1])


def _places(values: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    mean = np.cumsum(count) - (count + 1) / 2
    places: np.ndarray[Any, np.dtype[np.float64]] = mean[place]
    return places


def to_markdown(rows: list[Row], agreed: Agreement) -> str:
    lines = [
        "| layout | predicted ms | measured ms | predicted / measured | CPU ms of all ranks |",
        "|---|---|---|---|---|",
    ]
    for row, ratio in sorted(zip(rows, agreed.ratios, strict=True), key=lambda pair: pair[0].predicted):
        lines.append(
            f"| {row.name} | {1e3 * row.predicted:.0f} | {1e3 * row.wall:.0f} | {ratio:.2f} | {1e3 * row.cpu:.0f} |"
        )
    lines += [
        "",
        f"Rank correlation of predicted with measured seconds {agreed.wall_correlation:.2f}, with CPU seconds "
        f"{agreed.cpu_correlation:.2f}; predicted / measured has the median {median(agreed.ratios):.2f}.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
