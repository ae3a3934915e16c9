"""Collects what the MoE layers of all ranks have counted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import deepspeed.comm as dist
import torch
from torch import Tensor

from ds_hybrid.dispatch.meter import WireBytes
from ds_hybrid.dispatch.modes import ALL_MODES
from ds_hybrid.moe.kinds import MoELayer
from ds_hybrid.observe.stats import LayerStats, MoEStats


class StatsReader:
    """Reads what the layers of all ranks have counted since the last time.

    Args:
        layers: of the model, in one order on every rank.
        training_alone: leave out the bytes and tokens of evaluation, and the time it took.
    """

    def __init__(self, layers: Sequence[MoELayer], *, training_alone: bool = False) -> None:
        self._layers = layers
        self._training_alone = training_alone
        self.skip()

    def skip(self) -> None:
        """Forget what was counted since the last time. Waits for the device."""
        self._seen = [layer.expert_load.clone() for layer in self._layers]
        self._sent = [self._total(layer) for layer in self._layers]

    def _total(self, layer: MoELayer) -> WireBytes:
        return layer.meter.training_total() if self._training_alone else layer.meter.total()

    def take(self) -> MoEStats:
        """The counts of every layer since the last time, summed over all ranks, in one exchange. Collective."""
        if not self._layers:
            return MoEStats(())
        seen, sent = self._seen, self._sent
        self.skip()
        counts = [
            _counts(layer, self._sent[number].since(sent[number]), self._seen[number] - seen[number])
            for number, layer in enumerate(self._layers)
        ]
        total = torch.cat(counts)
        dist.all_reduce(total)
        of_layer = total.split([len(part) for part in counts])
        return MoEStats(tuple(_stats_of(*pair) for pair in zip(self._layers, of_layer, strict=True)))


def _counts(layer: MoELayer, sent: WireBytes, load: Tensor) -> Tensor:
    """One row: totals, the bytes by mode, by place the arrived tokens and the experts' time, the load; int64."""
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
