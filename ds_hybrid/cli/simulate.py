"""``ds_hybrid simulate``: a run on machines that are not rented yet, step by step, from its routing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ds_hybrid.cli.arguments import add_workload_kinds, count, output_file, workload
from ds_hybrid.cli.output import aligned, new_figure, save_figure
from ds_hybrid.config import RebalanceConfig
from ds_hybrid.dispatch.modes import ALL_MODES, WireDtype
from ds_hybrid.errors import HybridError
from ds_hybrid.plan.machine import read_machine
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.popularity import Popularity, read_popularity
from ds_hybrid.plan.routing import limits_left_out
from ds_hybrid.plan.simulate import Outcome, Setting, simulate
from ds_hybrid.plan.techniques import Row, techniques
from ds_hybrid.plan.windows import RebalancePolicy
from ds_hybrid.problems import did_you_mean
from ds_hybrid.rebalance.algorithms import Algorithm

_EXAMPLES = """examples:
  ds_hybrid simulate run.npz --cluster a100x8_ib200 --ranks 16 --ep 8 --dispatch two_stage,alltoall
  ds_hybrid simulate zipf:1.0,drift=0.01 --cluster h100x8_ib400 --ranks 1024 --ep 8,16 --rebalance static,swap
  ds_hybrid simulate zipf:1.0,drift=0.01 --cluster a100x8_ib200 --ranks 16 --seq-len 32768 --article

A trace is a .npz file with an array counts [steps, layers, experts] of integers: (token, choice) pairs by expert. The
model is taken with as many experts as the trace has and, by --top-k, as many choices.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command."""
    defaults = RebalanceConfig()
    parser = commands.add_parser(
        "simulate",
        help="play a routing trace, or drifting routing, on a cluster of any size",
        description="Predict every step of a run from its routing: for each dispatcher, expert-parallel size and "
        "rebalancing the time of the slowest rank, bytes and moves.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "routing", metavar="TRACE|zipf:S[,drift=D]", help="recorded routing (a .npz file, a run's directory), or drawn"
    )
    parser.add_argument(
        "--cluster", required=True, metavar="NAME", help="a table of ds_configs/machines, or a file of that form"
    )
    parser.add_argument("--ranks", required=True, type=count, metavar="N", help="GPUs, from 4 on")
    parser.add_argument("--ep", type=_counts, metavar="N[,N]", help="expert-parallel sizes (8)")
    parser.add_argument("--tp", type=count, metavar="N", help="tensor-parallel size (1)")
    parser.add_argument(
        "--dispatch",
        type=lambda text: _words(text, ALL_MODES),
        metavar="MODE[,MODE]",
        help=f"of {', '.join(ALL_MODES)} (two_stage)",
    )
    parser.add_argument(
        "--rebalance",
        type=lambda text: _words(text, get_args(Algorithm)),
        metavar="NAME[,NAME]",
        help=f"of {', '.join(get_args(Algorithm))} (static)",
    )
    parser.add_argument(
        "--interval", type=count, default=defaults.interval, metavar="STEPS", help="between decisions (%(default)s)"
    )
    parser.add_argument(
        "--event-seconds",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="what a rebalance takes besides its moves: planning, waiting for each other (%(default)s)",
    )
    parser.add_argument(
        "--model", default="qwen3_30b_a3b", metavar="NAME", help="a table of ds_configs/models, or a config.json"
    )
    parser.add_argument("--top-k", type=count, metavar="K", help="choices of a token in the trace, if not the model's")
    parser.add_argument("--seq-len", type=count, default=4096, metavar="L", help="tokens of a sequence (%(default)s)")
    parser.add_argument(
        "--micro-batch", type=count, default=1, metavar="B", help="sequences of a forward (%(default)s)"
    )
    parser.add_argument("--zero-stage", type=int, choices=range(4), default=1, metavar="STAGE", help="(%(default)s)")
    parser.add_argument("--wire-dtype", choices=get_args(WireDtype), help="(auto)")
    parser.add_argument(
        "--checkpoints", action="store_true", help="layers are computed again in backward, the loss is taken in chunks"
    )
    add_workload_kinds(parser)
    parser.add_argument("--steps", type=count, metavar="N", help="of the run: all of the trace, or 1000")
    parser.add_argument(
        "--article", action="store_true", help="instead: the article's five techniques, each alone and all together"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="also draw the steps: .png, .svg or .pdf")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The table on stdout."""
    if arguments.ranks < 4:
        raise HybridError(f"--ranks {arguments.ranks}: must be at least 4.")
    if arguments.article:
        _refuse_beside_article(arguments)
    model, machine = read_model(arguments.model), read_machine(arguments.cluster)
    work = workload(arguments, model)
    popularity = read_popularity(arguments.routing, model, num_steps=arguments.steps, top_k=arguments.top_k)
    setting = Setting(
        model,
        work,
        machine,
        machine.cluster(arguments.ranks),
        tp_size=arguments.tp or 1,
        zero_stage=arguments.zero_stage,
        wire_dtype=arguments.wire_dtype or "auto",
        checkpoints=arguments.checkpoints,
        event_seconds=arguments.event_seconds,
    )
    if arguments.article:
        rows = techniques(setting, popularity, _policy("static", arguments.interval))
        memory_bytes = machine.memory_bytes
        print(
            json.dumps([_row(row, memory_bytes) for row in rows], indent=2)
            if arguments.json
            else article_text(arguments, rows, memory_bytes)
        )
        return 0
    policies = [_policy(name, arguments.interval) for name in arguments.rebalance or ["static"]]
    modes, ep_sizes = arguments.dispatch or ["two_stage"], arguments.ep or [8]
    outcomes = simulate(setting, popularity, modes=modes, ep_sizes=ep_sizes, policies=policies)
    facts = to_json(arguments, setting, popularity, outcomes)
    print(json.dumps(facts, indent=2) if arguments.json else to_text(facts))
    if arguments.plot:
        _plot(outcomes, arguments.plot)
    return 0


def _refuse_beside_article(arguments: argparse.Namespace) -> None:
    """Its rows choose these themselves."""
    if arguments.plot:
        raise HybridError("--plot: draws runs, not the article's table. Leave out --article.")
    for option in ("ep", "tp", "dispatch", "rebalance", "wire_dtype", "checkpoints"):
        if getattr(arguments, option):
            raise HybridError(
                f"--{option.replace('_', '-')}: --article has its own in each row. Leave one of them out."
            )
    if arguments.ranks % 8:
        raise HybridError(f"--ranks {arguments.ranks}: --article has groups of 4 and of 8 ranks. Give a multiple of 8.")


def to_json(
    arguments: argparse.Namespace, setting: Setting, popularity: Popularity, outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """Everything that is told about a run; times in seconds."""
    num_steps, num_layers, num_experts = popularity.weights.shape
    return {
        "routing": arguments.routing,
        "num_steps": num_steps,
        "num_layers": num_layers,
        "num_experts": num_experts,
        "top_k": popularity.top_k,
        "model": arguments.model,
        "cluster": arguments.cluster,
        "num_ranks": arguments.ranks,
        "tp_size": setting.tp_size,
        "seq_len": arguments.seq_len,
        "micro_batch": arguments.micro_batch,
        "zero_stage": arguments.zero_stage,
        "wire_dtype": setting.wire_dtype,
        "dtype": arguments.dtype,
        "attention": arguments.attention,
        "checkpoints": arguments.checkpoints,
        "left_out": limits_left_out(setting.model),
        "memory_bytes": setting.machine.memory_bytes,
        "interval": arguments.interval,
        "event_seconds": arguments.event_seconds,
        "runs": [_outcome(each) | {"fits": each.fits(setting.machine)} for each in outcomes],
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "dispatch": outcome.mode,
        "ep_size": outcome.ep_size,
        "rebalance": outcome.algorithm,
        "tokens_per_second": outcome.tokens_per_second,
        "step_seconds": float(outcome.step_seconds.mean()),
        "step_seconds_p50": _quantile(outcome.step_seconds, 0.5),
        "step_seconds_p99": _quantile(outcome.step_seconds, 0.99),
        "expert_seconds": float(outcome.expert_seconds.mean()),
        "dispatch_seconds": float(outcome.dispatch_seconds.mean()),
        "moving_seconds": float(outcome.moving_seconds.sum()),
        "slowest_over_mean_p50": _quantile(outcome.imbalance, 0.5),
        "slowest_over_mean_p99": _quantile(outcome.imbalance, 0.99),
        "peak_memory_bytes": outcome.peak_memory,
        "wire_bytes_per_step": float(outcome.wire_bytes.mean()),
        "num_moves_of_group": outcome.num_moves,
        "num_moves_of_group_across_nodes": outcome.num_moves_across,
        "moved_bytes": outcome.moved_bytes,
        "rest": asdict(outcome.rest),
        "seconds_of_steps": outcome.step_seconds.tolist(),
    }


def to_text(facts: dict[str, Any]) -> str:
    """What :func:`to_json` gives, for people."""
    header = (
        "dispatch|EP|rebalance|ms a step|ms p50|ms p99|ms experts|ms dispatch|load p50|load p99|GB dispatched|moves"
        "|GB moved|GB memory"
    )
    rows = [tuple(header.split("|"))]
    for each in facts["runs"]:
        milliseconds = ("step_seconds", "step_seconds_p50", "step_seconds_p99", "expert_seconds", "dispatch_seconds")
        rows.append(
            (
                each["dispatch"],
                str(each["ep_size"]),
                each["rebalance"],
                *(f"{1e3 * each[key]:.1f}" for key in milliseconds),
                f"{each['slowest_over_mean_p50']:.3f}",
                f"{each['slowest_over_mean_p99']:.3f}",
                f"{each['wire_bytes_per_step'] / facts['num_ranks'] / 1e9:.2f}",
                str(each["num_moves_of_group"]),
                f"{each['moved_bytes'] / 1e9:.1f}",
                f"{each['peak_memory_bytes'] / 1e9:.1f}{'' if each['fits'] else '!'}",
            )
        )
    return "\n".join(
        [
            "{routing}: {num_steps} steps, {num_layers} layers, {num_experts} experts, top-{top_k}".format_map(facts),
            "{model} on {num_ranks} ranks of {cluster}: TP {tp_size}, ZeRO {zero_stage}, {micro_batch} x {seq_len} "
            "tokens; decisions every {interval} steps".format_map(facts),
            "",
            *aligned(rows),
            "",
            "ms of the slowest of all ranks; load: its experts' over the mean; GB dispatched by a rank a step; moves",
            "of one group; GB moved by all; GB memory of a rank at its fullest",
            *_does_not_fit(
                all(each["fits"] for each in facts["runs"]), facts["memory_bytes"], "--checkpoints, --zero-stage, --ep"
            ),
            *facts["left_out"],
        ]
    )


def _does_not_fit(everything_fits: bool, memory_bytes: float, options: str) -> list[str]:
    if everything_fits:
        return []
    return [f"! does not fit: a rank has {memory_bytes / 1e9:.1f} GB. See {options}"]


def _row(row: Row, memory_bytes: float) -> dict[str, Any]:
    return asdict(row) | {"fits": row.peak_memory <= memory_bytes}


def article_text(arguments: argparse.Namespace, rows: Sequence[Row], memory_bytes: float) -> str:
    """The article's techniques, for people. Speeds are compared by tokens per second: layouts differ in tokens."""
    base = rows[0].alone.tokens_per_second
    table = [("technique", "alone", "load", "together", "tokens/s", "ms a step", "dispatch", "experts", "load", "GB")]
    for row in rows:
        alone, together = row.alone, row.together
        table.append(
            (
                row.technique.ljust(max(len(each.technique) for each in rows)),
                f"x {alone.tokens_per_second / base:.3f}",
                f"{alone.imbalance:.3f}",
                *(
                    (
                        f"x {together.tokens_per_second / base:.3f}",
                        f"{together.tokens_per_second:.0f}",
                        f"{1e3 * together.step:.0f}",
                        f"{1e3 * together.dispatch:.0f}",
                        f"{1e3 * together.experts:.0f}",
                        f"{together.imbalance:.3f}",
                    )
                    if together
                    else ("-",) * 6
                ),
                f"{row.peak_memory / 1e9:.1f}{'' if row.peak_memory <= memory_bytes else '!'}",
            )
        )
    first = f"{arguments.model} on {arguments.ranks} ranks of {arguments.cluster}, {arguments.routing}: "
    return "\n".join(
        [
            first + f"{arguments.micro_batch} x {arguments.seq_len} tokens, ZeRO {arguments.zero_stage}",
            "",
            *aligned(table),
            "",
            "By the model of docs/planner.md, not measured. x: tokens per second over the base's; load: the busiest",
            "rank's over the mean; GB: memory of a rank at its fullest.",
            *_does_not_fit(
                all(row.peak_memory <= memory_bytes for row in rows), memory_bytes, "--zero-stage, --micro-batch"
            ),
        ]
    )


def _policy(algorithm: Algorithm, interval: int) -> RebalancePolicy:
    return RebalancePolicy(algorithm, interval, first=interval)


def _quantile(values: np.ndarray[Any, np.dtype[np.float64]], part: float) -> float:
    return float(np.quantile(values, part))


def _plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Milliseconds of each step, and the slowest rank's load."""
    figure = new_figure(9, 6)
    times, loads = figure.subplots(2, 1, sharex=True)
    for outcome in outcomes:
        label = f"{outcome.mode}, EP {outcome.ep_size}, {outcome.algorithm}"
        times.plot(1e3 * outcome.step_seconds, linewidth=1, label=label)
        loads.plot(outcome.imbalance, linewidth=1)
    times.set_ylabel("ms of a step")
    times.legend(fontsize="small")
    loads.set_ylabel("slowest rank's load / mean")
    loads.set_xlabel("step")
    save_figure(figure, path)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds from 0 on")
    return seconds


def _counts(text: str) -> list[int]:
    return [count(word) for word in _different(text)]


def _different(text: str) -> list[str]:
    words = text.split(",")
    repeated = [word for place, word in enumerate(words) if word in words[:place]]
    if repeated:
        raise argparse.ArgumentTypeError(f"{text!r} has {repeated[0]!r} twice. Name it once")
    return words


def _words(text: str, known: Sequence[Any]) -> list[Any]:
    words = _different(text)
    for word in words:
        if word not in known:
            raise argparse.ArgumentTypeError(
                f"{word!r} must be one of {', '.join(known)}.{did_you_mean(word, list(known))}"
            )
    return words
