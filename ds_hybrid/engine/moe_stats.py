"""Collects what the MoE layers of all ranks have counted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import deepspeed.comm as dist
import torch
from torch import Tensor

from ds_hybrid.dispatch.modes import ALL_MODES
from ds_hybrid.moe.kinds import MoELayer
from ds_hybrid.observe.stats import LayerStats, MoEStats


class StatsReader:
    """Reads what the layers of all ranks have counted since the last time.

    Args:
        layers: of the model, in one order on every rank.
    """

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self._layers = layers
        self._seen = [layer.expert_load.clone() for layer in layers]

    def take(self) -> MoEStats:
        """The counts of every layer since the last time, summed over all ranks, in one exchange. Collective."""
        if not self._layers:
            return MoEStats(())
        loads = [layer.expert_load.clone() for layer in self._layers]
        counts = [
            _counts(layer, load - seen) for layer, load, seen in zip(self._layers, loads, self._seen, strict=True)
        ]
        self._seen = loads
        total = torch.cat(counts)
        dist.all_reduce(total)
        of_layer = total.split([len(part) for part in counts])
        return MoEStats(tuple(_stats_of(*pair) for pair in zip(self._layers, of_layer, strict=True)))


def _counts(layer: MoELayer, load: Tensor) -> Tensor:
    """One row: totals, the bytes by mode, by place the arrived tokens and the experts' time, the load; int64."""
    sent = layer.meter.take()
    group = layer.dispatcher.group
    of_place = load.new_zeros(2, group.size)
    of_place[:, group.rank] = load.new_tensor([sent.num_arrived, round(sent.expert_seconds * 1e9)])
    totals = [sent.payload, sent.metadata, sent.lower_bound, sent.num_tokens, round(sent.exposed_seconds * 1e9)]
    by_mode = [sent.by_mode.get(mode, 0) for mode in ALL_MODES]
    return torch.cat([load.new_tensor([*totals, *by_mode]), of_place.flatten(), load])


def _stats_of(layer: MoELayer, counts: Tensor) -> LayerStats:
    num_ranks = layer.dispatcher.group.size
    numbers = iter(counts.tolist())
    payload, metadata, lower_bound, num_tokens, nanoseconds = islice(numbers, 5)
    by_mode = {mode: sent for mode, sent in zip(ALL_MODES, islice(numbers, len(ALL_MODES)), strict=True) if sent}
    arrived = tuple(islice(numbers, num_ranks))
    expert_seconds = tuple(value / 1e9 for value in islice(numbers, num_ranks))
    return LayerStats(
        name=layer.layer_name,
        mode=layer.dispatcher.mode,
        payload=payload,
        metadata=metadata,
        lower_bound=lower_bound,
        num_tokens=num_tokens,
        expert_load=tuple(numbers),
        wire_bytes_by_mode=by_mode,
        arrived=arrived,
        exposed_seconds=nanoseconds / 1e9,
        expert_seconds=expert_seconds,
        predicted_seconds=layer.switch.predicted,
    )
