"""Collects what the MoE layers of all ranks have counted."""

from __future__ import annotations

from collections.abc import Sequence

import deepspeed.comm as dist
import torch
from torch import Tensor

from ds_hybrid.dispatch.modes import ALL_MODES
from ds_hybrid.moe.autoep import HybridAutoEPLayer
from ds_hybrid.moe.layer import MoE
from ds_hybrid.observe.stats import LayerStats, MoEStats


def take_stats(layers: Sequence[HybridAutoEPLayer | MoE]) -> MoEStats:
    """The counts of every layer since the last time, summed over all ranks, in one exchange. Collective."""
    if not layers:
        return MoEStats(())
    counts = [_take_counts(layer) for layer in layers]
    total = torch.cat(counts)
    dist.all_reduce(total)
    of_layer = total.split([len(part) for part in counts])
    return MoEStats(tuple(_stats_of(*pair) for pair in zip(layers, of_layer, strict=True)))


def _take_counts(layer: HybridAutoEPLayer | MoE) -> Tensor:
    """One row of totals, the bytes by mode, the arrived tokens by place in the group, the load by expert: int64."""
    sent = layer.meter.take()
    load = layer.expert_load.clone()
    layer.expert_load.zero_()
    group = layer.dispatcher.group
    arrived = load.new_zeros(group.size)
    arrived[group.rank] = sent.num_arrived
    totals = [sent.payload, sent.metadata, sent.lower_bound, sent.num_tokens, round(sent.exposed_seconds * 1e9)]
    by_mode = [sent.by_mode.get(mode, 0) for mode in ALL_MODES]
    return torch.cat([load.new_tensor([*totals, *by_mode]), arrived, load])


def _stats_of(layer: HybridAutoEPLayer | MoE, counts: Tensor) -> LayerStats:
    payload, metadata, lower_bound, num_tokens, nanoseconds, *rest = counts.tolist()
    by_mode, rest = rest[: len(ALL_MODES)], rest[len(ALL_MODES) :]
    num_ranks = layer.dispatcher.group.size
    return LayerStats(
        name=layer.layer_name,
        mode=layer.dispatcher.mode,
        payload=payload,
        metadata=metadata,
        lower_bound=lower_bound,
        num_tokens=num_tokens,
        expert_load=tuple(rest[num_ranks:]),
        wire_bytes_by_mode={mode: sent for mode, sent in zip(ALL_MODES, by_mode, strict=True) if sent},
        arrived=tuple(rest[:num_ranks]),
        exposed_seconds=nanoseconds / 1e9,
        predicted_seconds=layer.switch.predicted,
    )
