"""Records as events of DeepSpeed's monitors (TensorBoard, W&B, CSV, Comet), in its style of names. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ds_hybrid.observe.events import StepRecord

MonitorEvent = tuple[str, float, int]
"""Name, value and ``global_samples``, as DeepSpeed's ``Monitor.write_events`` takes them."""

_PREFIX = "Train/Samples/"


def monitor_events(record: StepRecord) -> list[MonitorEvent]:
    """What monitors show of a step's record; DeepSpeed itself adds the learning rate."""
    return [
        (_PREFIX + name, float(value), record.samples) for name, value in _named_values(record) if value is not None
    ]


def moved_event(num_moved: int, samples: int) -> MonitorEvent:
    """Experts that a rebalance has moved."""
    return (f"{_PREFIX}moe_experts_moved", float(num_moved), samples)


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
    yield "host_memory_max", max(record.host_memory, default=None)
    yield "accelerator_memory_max", max(record.accelerator_memory or (), default=None)
    yield "nvlink_fraction_max", _largest(gpu.fraction for gpu in record.nvlink)
    for layer in layers:
        yield f"moe_load_max_over_mean/{layer.name}", layer.load_max_over_mean
        yield f"moe_load_entropy/{layer.name}", layer.load_entropy


def _largest(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
