"""``ds_hybrid simulate-rebalance``: what rebalancing would have done for the ranks of a run, from its routing trace."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from ds_hybrid.cli.arguments import count, output_file
from ds_hybrid.cli.output import aligned, new_figure, save_figure
from ds_hybrid.config import RebalanceConfig
from ds_hybrid.errors import HybridError
from ds_hybrid.rebalance.algorithms import Algorithm
from ds_hybrid.rebalance.simulate import BYTES_PER_PARAMETER, Replay, replay
from ds_hybrid.rebalance.trace import Trace, read_trace

DEFAULT_EXPERT_PARAMETERS = 3 * 2048 * 768
"""An expert of Qwen3-30B-A3B, for traces that do not tell."""

_EXAMPLES = """examples:
  ds_hybrid simulate-rebalance runs/1 --ep 8
  ds_hybrid simulate-rebalance run.npz --ep 8 --algorithm swap --interval 50 --json
  ds_hybrid simulate-rebalance run.npz --ep 16 --nodes 2 --cross-node-penalty 8 --kappa 0.5 --plot balance.png

A trace is a .npz file with an array counts [steps, layers, experts] of integers: (token, choice) pairs by expert.
A run with ds_hybrid.observe.routing_trace writes one in its directory.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command."""
    defaults = RebalanceConfig()
    parser = commands.add_parser(
        "simulate-rebalance",
        help="replay a routing trace with experts that move",
        description="Replay a routing trace: experts start contiguous and are re-placed every interval, from the loads "
        "of the steps before. Compares the ranks' loads with those of experts that stay.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a routing trace: a .npz file, or a run's directory")
    parser.add_argument("--ep", type=count, required=True, metavar="N", help="ranks that share the experts")
    parser.add_argument("--algorithm", choices=get_args(Algorithm), default=defaults.algorithm, help="%(default)s")
    parser.add_argument(
        "--interval", type=count, default=defaults.interval, metavar="STEPS", help="between decisions: %(default)s"
    )
    parser.add_argument(
        "--half-life",
        type=_number(least=0, above=True),
        default=defaults.load_half_life,
        metavar="STEPS",
        help="after which a load counts half in the forecast: %(default)s",
    )
    parser.add_argument(
        "--min-gain",
        type=_number(least=0),
        default=defaults.min_gain,
        metavar="FRACTION",
        help="least fall of a busiest rank's forecast load that moves experts, of the mean: %(default)s",
    )
    parser.add_argument(
        "--horizon",
        type=count,
        default=defaults.horizon,
        metavar="STEPS",
        help="over which moves must earn their cost back: %(default)s",
    )
    parser.add_argument(
        "--kappa",
        type=_number(least=0),
        default=0.0,
        metavar="STEPS",
        help="cost of moving one expert, in steps of its layer's balanced expert time: %(default)s",
    )
    parser.add_argument("--nodes", type=count, default=1, metavar="N", help="that the ranks are spread over in order")
    parser.add_argument(
        "--cross-node-penalty",
        type=_number(least=1),
        default=1.0,
        metavar="FACTOR",
        help="cost of a move across nodes compared with one inside: %(default)s",
    )
    parser.add_argument(
        "--start", type=int, metavar="STEP", help="where re-placing and scoring begin: half of the trace"
    )
    parser.add_argument(
        "--average-over",
        type=count,
        default=100,
        metavar="STEPS",
        help="added up before ranks are compared, to imitate a larger batch: %(default)s",
    )
    parser.add_argument(
        "--expert-parameters", type=count, metavar="N", help="of one expert, if the trace does not tell: for the bytes"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="also draw it: .png, .svg or .pdf")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The comparison on stdout."""
    trace = read_trace(arguments.trace)
    if arguments.ep % arguments.nodes:
        raise HybridError(f"--nodes {arguments.nodes} does not divide --ep {arguments.ep}. Nodes must be equal.")
    result = replay(
        trace,
        ep_size=arguments.ep,
        algorithm=arguments.algorithm,
        interval=arguments.interval,
        half_life=arguments.half_life,
        min_gain=arguments.min_gain,
        horizon=arguments.horizon,
        kappa=arguments.kappa,
        start=arguments.start,
        average_over=arguments.average_over,
        node_of_rank=[rank * arguments.nodes // arguments.ep for rank in range(arguments.ep)],
        cross_node_penalty=arguments.cross_node_penalty,
    )
    facts = to_json(arguments, trace, result)
    print(json.dumps(facts, indent=2) if arguments.json else to_text(facts))
    if arguments.plot:
        _plot(result, arguments)
    return 0


def to_json(arguments: argparse.Namespace, trace: Trace, result: Replay) -> dict[str, Any]:
    """Everything that is told about a replay; spreads and card totals in percent."""
    parameters = arguments.expert_parameters or trace.expert_parameters
    moved = result.moved_fraction
    num_steps, num_layers, num_experts = trace.counts.shape
    return {
        "trace": str(arguments.trace),
        "num_steps": num_steps,
        "num_layers": num_layers,
        "num_experts": num_experts,
        "algorithm": arguments.algorithm,
        "ep_size": arguments.ep,
        "interval": arguments.interval,
        "half_life": arguments.half_life,
        "first_step": result.first_step,
        "num_steps_scored": result.num_steps,
        "average_over": arguments.average_over,
        "spread_before": result.before.spread,
        "spread_after": result.after.spread,
        "max_over_mean_before": result.before.max_over_mean,
        "max_over_mean_after": result.after.max_over_mean,
        "critical_path_before": result.before.critical_path,
        "critical_path_after": result.after.critical_path,
        "card_total_before": result.before.card_total,
        "card_total_after": result.after.card_total,
        "num_rebalances": len(moved),
        "num_moves": result.num_moves,
        "num_moves_across_nodes": result.num_moves_across,
        "moved_fraction_per_rebalance": sum(moved) / len(moved),
        "moved_fraction_max": max(moved),
        "expert_parameters": parameters or DEFAULT_EXPERT_PARAMETERS,
        "expert_parameters_known": parameters is not None,
        "bytes_moved": result.num_moves * BYTES_PER_PARAMETER * (parameters or DEFAULT_EXPERT_PARAMETERS),
        "layers": [
            {
                "spread_before": layer.spread_before,
                "spread_after": layer.spread_after,
                "max_over_mean_before": layer.max_over_mean_before,
                "max_over_mean_after": layer.max_over_mean_after,
                "num_moves": layer.num_moves,
                "bytes_moved": layer.num_moves * BYTES_PER_PARAMETER * (parameters or DEFAULT_EXPERT_PARAMETERS),
            }
            for layer in result.layers
        ],
    }


def to_text(facts: dict[str, Any]) -> str:
    """What :func:`to_json` gives, for people."""
    rows = [
        ("layer", "spread before", "after", "max/mean before", "after", "moves", "MB moved"),
        *(_row(str(index), layer) for index, layer in enumerate(facts["layers"])),
        _row("all", facts),
    ]
    last = facts["first_step"] + facts["num_steps_scored"]
    note = "" if facts["expert_parameters_known"] else ", assumed: --expert-parameters"
    return "\n".join(
        [
            "{trace}: {num_steps} steps, {num_layers} layers, {num_experts} experts".format_map(facts),
            "{algorithm} on {ep_size} ranks, every {interval} steps, loads of half-life {half_life:g}; "
            "steps {first_step} to {last}, {average_over} added up".format_map(facts | {"last": last}),
            "",
            *aligned(rows),
            "",
            f"critical path {facts['critical_path_before']:.3f} -> {facts['critical_path_after']:.3f} of the mean; "
            f"ranks' totals over layers {_percent(facts['card_total_before'])} -> "
            f"{_percent(facts['card_total_after'])}",
            "moves at {num_rebalances} rebalances: {num_moves}, {num_moves_across_nodes} across nodes; "
            "{moved_fraction_per_rebalance:.1%} of the experts each time, {moved_fraction_max:.1%} at most".format_map(
                facts
            ),
            f"bytes: {BYTES_PER_PARAMETER} for each of {facts['expert_parameters']:,} parameters of an expert{note}",
        ]
    )


def _row(name: str, facts: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        _percent(facts["spread_before"]),
        _percent(facts["spread_after"]),
        f"{facts['max_over_mean_before']:.3f}",
        f"{facts['max_over_mean_after']:.3f}",
        str(facts["num_moves"]),
        f"{facts['bytes_moved'] / 1e6:.1f}",
    )


def _percent(spread: float) -> str:
    return f"±{spread:.1f}%"


def _plot(result: Replay, arguments: argparse.Namespace) -> None:
    """Busiest rank over mean, by layer, before and after."""
    num_layers, num_blocks = result.max_over_mean.shape[1:]
    steps = [result.first_step + (block + 0.5) * arguments.average_over for block in range(num_blocks)]
    figure = new_figure(8, 1 + 2 * num_layers)
    axes = figure.subplots(num_layers, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for layer, panel in enumerate(axes):
        for values, label in zip(result.max_over_mean[:, layer], ("experts stay", arguments.algorithm), strict=True):
            panel.plot(steps, values, marker="o", label=label)
        panel.axhline(1.0, color="0.7", linewidth=1)
        panel.set_ylabel(f"layer {layer}")
    axes[0].legend()
    axes[-1].set_xlabel("step")
    figure.suptitle(f"busiest of {arguments.ep} ranks over their mean, {arguments.average_over} steps added up")
    save_figure(figure, arguments.plot)


def _number(*, least: float, above: bool = False) -> Callable[[str], float]:
    """A kind of argument: a finite number of at least ``least``, or above it."""

    def kind(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least or (above and value == least):
            raise argparse.ArgumentTypeError(f"{text!r} must be a number {'>' if above else '>='} {least:g}")
        return value

    return kind
