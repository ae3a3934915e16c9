"""What a run's MoE layers sent and how evenly their experts were loaded. Knows no engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_hybrid.dispatch.modes import Mode


@dataclass(frozen=True)
class LayerStats:
    """One MoE layer, summed over all ranks.

    Attributes:
        name: the layer's name in the model.
        mode: its dispatcher at present.
        payload: bytes of rows and riding weights that left a rank, forward and backward.
        metadata: bytes of routing ids, counts and headers.
        lower_bound: bytes that had to cross, see :class:`ds_hybrid.dispatch.meter.WireBytes`.
        num_tokens: tokens routed.
        expert_load: for each logical expert, the (token, choice) pairs that chose it in training.
        wire_bytes_by_mode: payload and metadata together, by the dispatcher that sent them.
        arrived: for each place in the expert-parallel group, the tokens that reached its experts, its own among them;
            in mode ``alltoall`` once for each choice.
        exposed_seconds: how long ranks stood still for messages, slower ranks' delay included.
        expert_seconds: for each place in the expert-parallel group, how long the experts of its ranks took in
            training's forward.
        predicted_seconds: where the mode is ``auto``, a call in each mode that was weighed at the last choice.
    """

    name: str
    mode: Mode
    payload: int
    metadata: int
    lower_bound: int
    num_tokens: int
    expert_load: tuple[int, ...]
    wire_bytes_by_mode: Mapping[Mode, int] = field(default_factory=dict)
    arrived: tuple[int, ...] = ()
    exposed_seconds: float = 0.0
    expert_seconds: tuple[float, ...] = ()
    predicted_seconds: Mapping[Mode, float] = field(default_factory=dict)

    @property
    def load_max_over_mean(self) -> float:
        """The busiest expert's load over the mean load; nan when nothing was routed."""
        return _max_over_mean(self.expert_load)

    @property
    def receiver_max_over_mean(self) -> float:
        """The tokens that reached the busiest rank over the mean of the ranks; nan when nothing arrived."""
        return _max_over_mean(self.arrived)

    @property
    def lower_bound_ratio(self) -> float:
        """Bytes sent, metadata included, over bytes that had to cross; nan when nothing had to."""
        return _ratio(self.payload + self.metadata, self.lower_bound)


@dataclass(frozen=True)
class MoEStats:
    """All MoE layers of a model."""

    layers: tuple[LayerStats, ...]

    @property
    def wire_bytes_per_token(self) -> float:
        """Bytes that a token costs in all layers together, forward and backward, metadata included."""
        return sum((layer.payload + layer.metadata) / layer.num_tokens for layer in self.layers if layer.num_tokens)

    @property
    def wire_bytes_by_mode(self) -> dict[Mode, int]:
        """Bytes sent by each dispatcher, metadata included."""
        return dict(sum((Counter(layer.wire_bytes_by_mode) for layer in self.layers), Counter()))

    @property
    def exposed_seconds(self) -> float:
        """How long ranks stood still for messages of any layer."""
        return sum(layer.exposed_seconds for layer in self.layers)

    @property
    def lower_bound_ratio(self) -> float:
        """Bytes sent, metadata included, over bytes that had to cross; nan when nothing had to."""
        return _ratio(
            sum(layer.payload + layer.metadata for layer in self.layers),
            sum(layer.lower_bound for layer in self.layers),
        )

    @property
    def load_max_over_mean(self) -> float:
        """The worst layer's busiest expert over its mean; nan when there is no layer with load."""
        ratios = [layer.load_max_over_mean for layer in self.layers if any(layer.expert_load)]
        return max(ratios, default=float("nan"))


def _max_over_mean(counts: tuple[int, ...]) -> float:
    total = sum(counts)
    return max(counts) * len(counts) / total if total else float("nan")


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")
