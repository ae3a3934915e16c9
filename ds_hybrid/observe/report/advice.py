"""What a run's records suggest to do, in words. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from ds_hybrid.observe.events import RunRecord, StepRecord
from ds_hybrid.observe.report.scales import in_bytes, in_percent, in_seconds, significant, times
from ds_hybrid.observe.report.view import Advice, LayerView, StepView, mean
from ds_hybrid.observe.run_directory import RunEvents
from ds_hybrid.rebalance.algorithms import lower_bound

UNEVEN: Final = 1.3
"""The busiest rank's load over the mean, from which on it is worth doing something."""

EXPOSED: Final = 0.15
"""The part of the ranks' time spent waiting for messages, from which on it is worth doing something."""

NEAR_BEST: Final = 1.1
"""That load over the least that any placement reaches, below which moving experts is not worth naming."""

FAR_FROM_BOUND: Final = 1.5
"""Wire bytes over the lower bound, likewise."""

SLOWER: Final = 0.8
"""Tokens per second at the end over those at the beginning, below which it is told."""

MORE_MEMORY: Final = 1.3
"""Host memory at the end over that after a quarter of the run, above which it is told."""

RESTLESS: Final = 4
"""Changes of one layer's dispatcher, from which on it is told."""

MONITORS: Final = ("tensorboard", "wandb", "csv_monitor", "comet")
"""DeepSpeed's sections for monitors."""


def advice_for(events: RunEvents, layers: Sequence[LayerView], step: StepView | None) -> tuple[Advice, ...]:
    """Everything worth telling, the gravest first."""
    run = events.run
    found = [
        *_about_records(events),
        *_about_loss(events.steps),
        *_about_rebalancer(events),
        *_about_load(layers, run),
        *_about_waiting(events.steps, layers, run),
        *_about_waiting_in_attention(events.steps, run),
        *_about_bytes(layers, run),
        *_about_dispatchers(events),
        *_about_silent_experts(layers),
        *_about_speed(events.steps),
        *_about_memory(events.steps),
        *_about_timeline(step, run),
        *_about_monitors(run),
    ]
    order = ("problem", "advice", "note")
    return tuple(sorted(found, key=lambda each: order.index(each.severity)))


def _about_records(events: RunEvents) -> list[Advice]:
    found = [Advice("note", "Not all that was written is shown", f"{warning}.") for warning in events.warnings]
    if not events.steps:
        interval = events.run.section("ds_hybrid.observe").get("interval", 10)
        text = (
            f"The run wrote its start and no step. Records come every ds_hybrid.observe.interval = {interval} "
            "optimizer steps: it stopped earlier, or has not come so far yet."
        )
        found.append(Advice("problem", "No step was recorded", text))
    return found


def _about_loss(steps: Sequence[StepRecord]) -> list[Advice]:
    broken = [record for record in steps if record.loss is not None and not math.isfinite(record.loss)]
    if not broken:
        return []
    first = broken[0]
    text = (
        f"It is {first.loss} in the record of step {first.step} and in {len(broken)} of {len(steps)} records. Resume "
        "from a checkpoint before it with a lower learning rate or gradient_clipping; check the data of these steps."
    )
    return [Advice("problem", f"The loss is not a number from step {first.step} on", text)]


def _about_rebalancer(events: RunEvents) -> list[Advice]:
    found = []
    for record in events.rebalances:
        if record.action == "off":
            found.append(Advice("problem", f"Rebalancing switched itself off at step {record.step}", record.reason))
        elif record.action == "failed":
            found.append(Advice("problem", f"Experts could not be moved at step {record.step}", record.reason))
    lost = Counter(gain.layer for gain in events.gains if gain.measured < 0)
    for layer, count in lost.items():
        measured = [gain.measured for gain in events.gains if gain.layer == layer]
        text = (
            f"{count} of {len(measured)} measured moves cost time, {in_seconds(abs(mean(measured)))} a step "
            f"{'lost' if mean(measured) < 0 else 'gained'} on average. Its load changes faster than it is looked at: "
            "raise rebalance.load_half_life or min_gain."
        )
        found.append(Advice("note", f"{layer}: moves that did not pay", text))
    return found


def _about_load(layers: Sequence[LayerView], run: RunRecord) -> list[Advice]:
    uneven = [layer for layer in layers if len(layer.last_slots) > 1 and layer.late_spread() >= UNEVEN]
    if not uneven:
        return []
    worst = max(uneven, key=lambda layer: layer.late_spread())
    others = f"; {len(uneven)} of {len(layers)} layers are above {times(UNEVEN)}" if len(uneven) > 1 else ""
    title = f"{worst.name}: the busiest rank gets {times(worst.late_spread())} the mean"
    loads, num_ranks = worst.late_loads().astype(np.float64), len(worst.last_slots)
    best = lower_bound(loads, num_ranks) * num_ranks / float(loads.sum())
    if worst.late_spread() < NEAR_BEST * best:
        text = (
            f"Expert {int(loads.argmax())} has {times(float(loads.max() / loads.mean()))} the mean expert's tokens: no "
            f"placement brings the busiest rank below {times(best)}{others}. Raise the balance loss, or take a smaller "
            "expert-parallel size."
        )
        return [Advice("advice", title, text)]
    config = run.section("ds_hybrid.rebalance")
    if not config.get("enabled"):
        text = "Switch rebalancing on: ds_hybrid.rebalance.enabled = true moves experts when it pays."
    elif config.get("dry_run"):
        text = "Rebalancing only tells what it would do: set ds_hybrid.rebalance.dry_run = false."
    else:
        text = (
            "Rebalancing is on, and what it decided is below. Look more often (a smaller rebalance.interval, or "
            "rebalance.threshold), or raise the balance loss."
        )
    return [Advice("advice", title, f"{text} A placement could reach {times(best)} at best{others}.")]


def _about_waiting(steps: Sequence[StepRecord], layers: Sequence[LayerView], run: RunRecord) -> list[Advice]:
    late = mean([record.exposed_fraction for record in _late(steps) if record.exposed_fraction is not None])
    if not late >= EXPOSED:
        return []
    dispatch = run.section("ds_hybrid.dispatch")
    chunks = dispatch.get("overlap_chunks", 1)
    ideas = []
    if any(len(layer.last_slots) > 1 and layer.late_spread() >= UNEVEN for layer in layers):
        ideas.append("part of it is waiting for the busiest rank: even out the load first")
    if chunks == 1:
        ideas.append("try ds_hybrid.dispatch.overlap_chunks = 2, so that one part travels while another computes")
    if dispatch.get("wire_dtype", "auto") == "auto" and run.device != "cpu":
        ideas.append("try dispatch.wire_dtype = fp8_e4m3, half the bytes on the way out")
    named = dispatch.get("mode", "auto")
    if named not in ("auto", "hierarchical") and any(_spans_nodes(layer, run) for layer in layers):
        ideas.append("try dispatch.mode = hierarchical if nodes are joined by slow links")
    if not ideas:
        ideas.append(f"with overlap_chunks = {chunks} already, larger micro-batches give it more to hide behind")
    return [Advice("advice", f"Exposed communication takes {in_percent(late)}", _sentence(ideas))]


def _about_waiting_in_attention(steps: Sequence[StepRecord], run: RunRecord) -> list[Advice]:
    fractions = [record.attention.exposed_fraction for record in _late(steps) if record.attention is not None]
    late = mean([fraction for fraction in fractions if fraction is not None])
    if not late >= EXPOSED:
        return []
    attention = run.section("ds_hybrid.attention")
    ideas = []
    if attention.get("kv_gather") != "auto":
        ideas.append("try ds_hybrid.attention.kv_gather = auto, which picks by sizes and links")
    if attention.get("wire_dtype", "auto") == "auto" and run.device != "cpu":
        ideas.append("try attention.wire_dtype = fp8_e4m3, half the bytes of keys and values")
    if attention.get("memory_bytes") is None:
        ideas.append("with attention.memory_bytes set, what fits is kept, and need not come again in backward")
    ideas.append("a smaller sequence_parallel_size leaves more to compute for each byte")
    return [Advice("advice", f"Exposed communication of attention takes {in_percent(late)}", _sentence(ideas))]


def _sentence(ideas: Sequence[str]) -> str:
    text = "; ".join(ideas)
    return f"{text[0].upper()}{text[1:]}."


def _about_bytes(layers: Sequence[LayerView], run: RunRecord) -> list[Advice]:
    """Of the modes that can do with fewer bytes: two_stage, and by a name in the config alltoall and allgather. What
    ``auto`` takes is predicted to be quicker, whatever it sends."""
    named = run.section("ds_hybrid.dispatch").get("mode", "auto")
    wasteful = {"two_stage"} if named == "auto" else {"two_stage", "alltoall", "allgather"}
    far = [layer for layer in layers if layer.wire.ratio >= FAR_FROM_BOUND and layer.wire.by_mode.keys() <= wasteful]
    if not far:
        return []
    worst = max(far, key=lambda layer: layer.wire.ratio)
    used = ", ".join(sorted({mode for layer in far for mode in layer.wire.by_mode}))
    text = (
        f"{len(far)} of {len(layers)} layers send at least {times(FAR_FROM_BOUND)} what has to cross, with {used}. "
        + (
            "Short sequences make metadata weigh more: use larger micro-batches."
            if used == "two_stage"
            else "Set ds_hybrid.dispatch.mode = two_stage, which sends each token once to each rank that needs it; "
            "keep it if tokens per second rise."
        )
    )
    return [Advice("advice", f"{worst.name} sends {times(worst.wire.ratio)} the lower bound", text)]


def _about_dispatchers(events: RunEvents) -> list[Advice]:
    changes = Counter(record.layer for record in events.dispatchers)
    restless = {layer: count for layer, count in changes.items() if count >= RESTLESS}
    if not restless:
        return []
    layer, count = max(restless.items(), key=lambda each: each[1])
    text = (
        f"{len(restless)} layers did so {RESTLESS} times or more. Name the mode in ds_hybrid.dispatch.mode to stop it."
    )
    return [Advice("note", f"{layer} changed its dispatcher {count} times", text)]


def _about_silent_experts(layers: Sequence[LayerView]) -> list[Advice]:
    silent = {layer.name: int((layer.late_loads() == 0).sum()) for layer in layers}
    silent = {name: count for name, count in silent.items() if count}
    if not silent:
        return []
    name, count = max(silent.items(), key=lambda each: each[1])
    text = (
        f"What no token reaches learns nothing: {sum(silent.values())} of all layers' experts. Raise the balance loss."
    )
    return [Advice("advice", f"{name}: {count} expert{'' if count == 1 else 's'} got no token lately", text)]


def _about_speed(steps: Sequence[StepRecord]) -> list[Advice]:
    speeds = [record.tokens_per_second for record in steps if record.tokens_per_second]
    quarter = len(speeds) // 4
    if quarter < 2:
        return []
    early, late = (float(np.median(part)) for part in (speeds[quarter : 2 * quarter], speeds[-quarter:]))
    if late >= SLOWER * early:
        return []
    text = (
        f"{significant(early)} tokens per second became {significant(late)}. See whether exposed communication, the "
        "busiest rank or memory grew meanwhile; else look at the machine and the data loader."
    )
    return [Advice("advice", f"The run became {in_percent(1 - late / early)} slower", text)]


def _about_memory(steps: Sequence[StepRecord]) -> list[Advice]:
    largest = [max(record.host_memory) for record in steps if record.host_memory]
    quarter = len(largest) // 4
    if quarter < 1 or largest[-1] <= MORE_MEMORY * largest[quarter]:
        return []
    early, late = in_bytes(largest[quarter]), in_bytes(largest[-1])
    text = f"The largest process had {early} at step {steps[quarter].step}, {late} at the end."
    return [Advice("note", "Host memory keeps growing", text)]


def _about_timeline(step: StepView | None, run: RunRecord) -> list[Advice]:
    if step is None or len(step.ranks) < 2:
        return []
    experts = [rank.seconds("experts") for rank in step.ranks]
    average = mean(experts)
    if not average or max(experts) < UNEVEN * average:
        return []
    slowest = step.ranks[int(np.argmax(experts))]
    text = (
        f"In step {step.step} its experts took {in_seconds(max(experts))}, the ranks' mean is {in_seconds(average)}. "
        "If its load is no higher than others', the device or host is slow: run ds_hybrid doctor."
    )
    return [Advice("note", f"Rank {slowest.rank} on {slowest.node} is the slowest", text)]


def _about_monitors(run: RunRecord) -> list[Advice]:
    sections = [run.ds_config.get(name) for name in MONITORS]
    if any(isinstance(section, Mapping) and section.get("enabled") for section in sections):
        return []
    text = (
        'No monitor is on. {"tensorboard": {"enabled": true}} in the ds_config (or wandb, csv_monitor, comet) shows '
        "loss, load and bytes while the run goes on."
    )
    return [Advice("note", "Watch it live", text)]


def _spans_nodes(layer: LayerView, run: RunRecord) -> bool:
    nodes = run.node_of_rank
    return len({nodes[rank] for rank in layer.group if rank < len(nodes)}) > 1


def _late(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    return steps[-max(1, len(steps) // 4) :]
