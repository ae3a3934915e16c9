"""What ran, in words: the rows under the report's figures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ds_hybrid.observe.events import RunRecord, StepRecord
from ds_hybrid.observe.report.scales import in_seconds, in_utc
from ds_hybrid.observe.run_directory import RunEvents


def facts_of(events: RunEvents) -> tuple[tuple[str, str], ...]:
    """(name, value) rows of the start that made the last steps, and of all that led to it."""
    run = events.run
    resumed = ", ".join(f"at step {resume.step}" for resume in events.resumes)
    return (
        ("Model", f"{run.model}, {_layers(run)}"),
        ("Ranks", f"{run.world_size} {_where(run.node_of_rank)}, {run.device}"),
        ("Parallelism", _parallelism(run)),
        ("Dispatcher", _dispatcher(run)),
        ("Rebalancing", _rebalancing(run)),
        ("Began", in_utc(events.runs[0].time)),
        ("Training time", in_seconds(sum(record.seconds for record in events.steps))),
        ("Records", f"{len(events.steps)}, each of {_intervals(events.steps)}"),
        *([("Resumed", resumed)] if resumed else []),
        ("Versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
    )


def _layers(run: RunRecord) -> str:
    shapes = Counter((layer.num_experts, layer.top_k) for layer in run.layers)
    if not shapes:
        return "no MoE layers"
    return " and ".join(
        f"{count} MoE layer{'s' if count > 1 else ''} of {experts} experts, top-{top_k}"
        for (experts, top_k), count in shapes.items()
    )


def _where(node_of_rank: Sequence[str]) -> str:
    nodes = list(dict.fromkeys(node_of_rank))
    if len(nodes) == 1:
        return f"on {nodes[0]}"
    return f"on {len(nodes)} nodes ({', '.join(nodes[:4])}{', ...' if len(nodes) > 4 else ''})"


def _parallelism(run: RunRecord) -> str:
    ep_sizes = sorted({layer.ep_size for layer in run.layers}) or [1]
    stage = run.section("zero_optimization").get("stage", 0)
    return f"expert {', '.join(map(str, ep_sizes))}, tensor {run.tp_size}, ZeRO {stage}"


def _dispatcher(run: RunRecord) -> str:
    dispatch = run.section("ds_hybrid.dispatch")
    wire_dtype = dispatch.get("wire_dtype", "auto")
    return f"{dispatch.get('mode', 'auto')}{'' if wire_dtype == 'auto' else f', {wire_dtype} on the wire'}"


def _rebalancing(run: RunRecord) -> str:
    rebalance = run.section("ds_hybrid.rebalance")
    if not rebalance.get("enabled"):
        return "off"
    dry_run = ", dry run" if rebalance.get("dry_run") else ""
    return f"{rebalance.get('algorithm', 'swap')}, every {rebalance.get('interval', 50)} steps{dry_run}"


def _intervals(steps: Sequence[StepRecord]) -> str:
    sizes = sorted({record.num_steps for record in steps})
    if not sizes:
        return "no steps yet"
    shown = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return f"{shown} step{'' if sizes == [1] else 's'}"
