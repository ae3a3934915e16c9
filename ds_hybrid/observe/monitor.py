"""Records as events of DeepSpeed's monitors (TensorBoard, W&B, CSV, Comet), in its style of names. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ds_hybrid.dispatch.choose import DispatcherChange
from ds_hybrid.observe.events import StepRecord
from ds_hybrid.rebalance.look import Look

MonitorEvent = tuple[str, float, int]
"""Name, value and ``global_samples``, as DeepSpeed's ``Monitor.write_events`` takes them."""

_PREFIX = "Train/Samples/"


def monitor_events(record: StepRecord) -> list[MonitorEvent]:
    """What monitors show of a step's record; DeepSpeed itself adds the learning rate."""
    return _events(_named_values(record), record.samples)


def change_events(changes: Sequence[DispatcherChange], samples: int) -> list[MonitorEvent]:
    """How many layers changed their dispatcher, if any did."""
    return _events([("moe_dispatcher_changes", len(changes) or None)], samples)


def look_events(look: Look, samples: int) -> list[MonitorEvent]:
    """What a look at the load brought: experts moved, seconds per step that moves should bring and have brought."""
    paying = [outlook.gain_seconds_per_step for outlook in look.outlooks.values() if outlook.pays]
    is_decided = look.outcome in ("moved", "dry_run") and bool(paying)
    return _events(
        [
            ("moe_experts_moved", None if look.move is None else look.move.num_moved),
            ("moe_rebalance_predicted_gain", sum(paying) if is_decided else None),
            ("moe_rebalance_measured_gain", sum(gain.measured for gain in look.gains) if look.gains else None),
        ],
        samples,
    )


def moved_events(num_moved: int, samples: int) -> list[MonitorEvent]:
    """Experts that a call has moved."""
    return _events([("moe_experts_moved", num_moved)], samples)


def _events(values: Iterable[tuple[str, float | None]], samples: int) -> list[MonitorEvent]:
    return [(_PREFIX + name, float(value), samples) for name, value in values if value is not None]


def _named_values(record: StepRecord) -> Iterator[tuple[str, float | None]]:
    layers = record.layers
    yield "train_loss", record.loss
    yield "tokens_per_second", record.tokens_per_second
    yield "moe_load_max_over_mean", record.load_max_over_mean
    yield "moe_load_entropy", min((e for layer in layers if (e := layer.load_entropy) is not None), default=None)
    yield "moe_rank_load_max_over_mean", _largest(layer.rank_load_max_over_mean for layer in layers)
    yield "moe_expert_time_max_over_mean", _largest(layer.expert_time_max_over_mean for layer in layers)
    yield "moe_wire_bytes_per_token", record.wire_bytes_per_token
    yield "moe_lower_bound_ratio", record.lower_bound_ratio
    yield "moe_exposed_fraction", record.exposed_fraction
    for mode in sorted({mode for layer in layers for mode in layer.wire_bytes}):
        yield f"moe_wire_bytes_{mode}", sum(layer.wire_bytes.get(mode, 0) for layer in layers)
    if record.attention is not None:
        yield "attention_wire_bytes", record.attention.wire_bytes
        yield "attention_exposed_fraction", record.attention.exposed_fraction
    yield "host_memory_max", max(record.host_memory, default=None)
    yield "accelerator_memory_max", max(record.accelerator_memory or (), default=None)
    yield "nvlink_fraction_max", _largest(gpu.fraction for gpu in record.nvlink)
    for layer in layers:
        yield f"moe_load_max_over_mean/{layer.name}", layer.load_max_over_mean
        yield f"moe_load_entropy/{layer.name}", layer.load_entropy


def _largest(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
