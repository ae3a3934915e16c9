"""Compares expert-parallel MoE layers: DeepSpeed's MoE, DeepSpeed's AutoEP, and ds_hybrid in each of its modes.

    launch/run_local.sh 4 launch/bench/dispatch.py --shape E64k8 --routing uniform zipf --json bench.json
    torchrun --nproc_per_node 4 launch/bench/dispatch.py --methods autoep autoep_again two_stage --rounds 5

All layers have the same weights and see the same tokens and gradients. Each is first compared with experts computed one
by one in one process; one that differs is reported and not timed. The others run in turn, each once a round, and every
ratio is a median over rounds of ratios within a round. On a busy CPU only the ratios of CPU time mean something;
`autoep_again`, the baseline once more, shows how much.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from cases import (
    DEFAULT_SHAPES,
    ROUTINGS,
    SHAPES,
    Batch,
    Case,
    Expected,
    RoutingKind,
    expect,
    make_batch,
    relative_error,
    rows_that_must_cross,
)
from measure import Seconds, exchanges_of, memory_of, run_once, time_once
from methods import BASELINE, DEFAULT_METHODS, METHODS, Method, build, build_baseline, setup_of
from profiling import profile, to_text
from ranks import attempt, gathered, run_on_ranks
from results import (
    CaseResult,
    Costs,
    MethodResult,
    max_over_mean,
    summarize,
    to_json,
    to_markdown,
    with_ratios,
)

from ds_hybrid.errors import ConfigError

NUM_WARM_UPS = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """The command line."""

    shape: list[str]
    ep: list[int] | None
    routing: list[RoutingKind]
    tokens: int
    rounds: int
    methods: list[str]
    dtype: str
    json: Path | None
    markdown: Path | None
    profile: bool


def parse_options(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", nargs="+", choices=SHAPES, default=list(DEFAULT_SHAPES), help="(%(default)s; all: %(choices)s)"
    )
    parser.add_argument("--ep", nargs="+", type=int, help="sizes of the expert-parallel groups (the number of ranks)")
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=["uniform"], help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each method (%(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(DEFAULT_METHODS))
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the timed runs (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, not to the terminal")
    parser.add_argument("--profile", action="store_true", help="also print where each method spends its CPU time")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    options = vars(parser.parse_args(arguments))
    # The deepspeed launcher passes it; the environment tells the same under every launcher.
    del options["local_rank"]
    return Options(**options)


def main() -> int:
    """Returns the exit code."""
    options = parse_options()
    return run_on_ranks("dispatch.py", partial(run, options))


def run(options: Options, device: torch.device, environment: dict[str, Any]) -> None:
    """Measures every case, and shows after each what is known by then."""
    results: list[CaseResult] = []
    for case in cases_of(options):
        results.append(run_case(case, options, device))
        if dist.get_rank() == 0:
            show(results, environment, options)


def cases_of(options: Options) -> list[Case]:
    """Raises ``ConfigError`` for sizes that do not divide."""
    for ep_size in options.ep or []:
        if ep_size < 1 or dist.get_world_size() % ep_size:
            raise ConfigError(f"--ep {ep_size}: must divide the number of ranks, {dist.get_world_size()}.")
    return [
        Case(SHAPES[shape], ep_size, routing, options.tokens)
        for shape in options.shape
        for ep_size in options.ep or [dist.get_world_size()]
        for routing in options.routing
    ]


def show(results: Sequence[CaseResult], environment: dict[str, Any], options: Options) -> None:
    """After every case, so that a run that is ended early has told what it knows."""
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(results, environment), indent=1) + "\n")
    if options.markdown is not None:
        options.markdown.write_text(to_markdown(results, environment))
    else:
        print(to_markdown(results[-1:], environment), flush=True)


def run_case(case: Case, options: Options, device: torch.device) -> CaseResult:
    """Builds, compares, then times. All ranks call it together, and all see the same methods fail."""
    rank = dist.get_rank()
    expected = expect(case, rank)
    batch = make_batch(case, rank).to(device, torch.float32)
    compared = [compare(name, method, batch, expected) for name, method in built(case, options.methods, device)]

    batch = batch.to(device, DTYPES[options.dtype])
    right = [method for method, _ in compared if method is not None]
    for method in right:
        method.module.to(DTYPES[options.dtype])
    costs = {method.name: measure_untimed(method, batch) for method in right}
    rounds = measure_time(right, batch, options.rounds)
    if options.profile:
        for method in right:
            profiles = gathered(profile(method, batch, options.rounds, dist.barrier))
            if rank == 0:
                print(to_text(method.name, profiles), flush=True)

    row_bytes = case.shape.hidden_size * batch.tokens.element_size()
    lower_bound = 4 * row_bytes * sum(gathered(rows_that_must_cross(case, expected.topk_ids, rank)))
    methods = [
        result
        if method is None
        else summarize(result, gathered(costs[method.name]), gathered(rounds[method.name]), lower_bound)
        for method, result in compared
    ]
    load = torch.stack(gathered(expected.topk_ids.flatten().bincount(minlength=case.shape.num_experts))).sum(0)
    return CaseResult(
        case,
        options.dtype,
        options.rounds,
        expert_load=max_over_mean(load),
        rank_load=max_over_mean(load.view(case.ep_size, -1).sum(1)),
        lower_bound_bytes=lower_bound,
        methods=with_ratios(methods),
    )


def built(case: Case, names: Sequence[str], device: torch.device) -> Iterator[tuple[str, Method | str]]:
    """Each name with its layer, or with what keeps it from taking part."""
    baseline = build_baseline(case, device)
    for name in names:
        missing = setup_of(name).missing
        if missing is not None:
            yield name, missing
        elif name == BASELINE:
            yield name, baseline
        else:
            yield name, attempt(partial(build, name, case, baseline))


def compare(name: str, method: Method | str, batch: Batch, expected: Expected) -> tuple[Method | None, MethodResult]:
    """The method if it computes what it must on every rank, and how far off it is."""
    done = method if isinstance(method, str) else attempt(partial(run_once, method, batch))
    if isinstance(method, str) or isinstance(done, str):
        return None, MethodResult(name, "skipped", str(done))
    errors = relative_error(done[0], expected.output), relative_error(done[1], expected.grad_tokens)
    output_error, input_grad_error = (max(of_ranks) for of_ranks in zip(*gathered(errors), strict=True))
    result = MethodResult(name, "right", None, output_error, input_grad_error)
    tolerance = setup_of(name).tolerance
    if max(output_error, input_grad_error) <= tolerance:
        return method, result
    reason = (
        f"differs from the reference by {output_error:.1e} in the output and {input_grad_error:.1e} in the input "
        f"gradient, at most {tolerance:.0e} is allowed"
    )
    return None, replace(result, status="wrong", reason=reason)


def measure_untimed(method: Method, batch: Batch) -> Costs:
    """Warms up, and counts bytes and memory on the way."""
    for _ in range(NUM_WARM_UPS):
        run_once(method, batch)
    if method.meter is not None:
        method.meter.take()
    forward, backward = exchanges_of(method, batch)
    wire = None if method.meter is None else method.meter.take()
    meter_bytes = None if wire is None else wire.payload + wire.metadata
    return Costs(tuple(forward), tuple(backward), meter_bytes, memory_of(method, batch))


def measure_time(methods: Sequence[Method], batch: Batch, num_rounds: int) -> dict[str, list[Seconds]]:
    """Each method once a round; the one that starts moves on by one each round."""
    rounds: dict[str, list[Seconds]] = {method.name: [] for method in methods}
    gc.collect()
    gc.disable()
    for start in range(num_rounds):
        turn = start % max(len(methods), 1)
        for method in (*methods[turn:], *methods[:turn]):
            rounds[method.name].append(time_once(method, batch))
    gc.enable()
    return rounds


if __name__ == "__main__":
    sys.exit(main())
