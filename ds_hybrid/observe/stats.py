"""What a run's MoE layers sent and how evenly their experts were loaded. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerStats:
    """One MoE layer, summed over all ranks.

    Attributes:
        name: the layer's name in the model.
        mode: its dispatcher.
        payload: bytes of rows and riding weights that left a rank, forward and backward.
        metadata: bytes of routing ids, counts and headers.
        lower_bound: bytes that had to cross, see :class:`ds_hybrid.dispatch.meter.WireBytes`.
        num_tokens: tokens routed.
        expert_load: for each logical expert, the (token, choice) pairs that chose it in training.
    """

    name: str
    mode: str
    payload: int
    metadata: int
    lower_bound: int
    num_tokens: int
    expert_load: tuple[int, ...]

    @property
    def load_max_over_mean(self) -> float:
        """The busiest expert's load over the mean load; nan when nothing was routed."""
        total = sum(self.expert_load)
        return max(self.expert_load) * len(self.expert_load) / total if total else float("nan")


@dataclass(frozen=True)
class MoEStats:
    """All MoE layers of a model."""

    layers: tuple[LayerStats, ...]

    @property
    def wire_bytes_per_token(self) -> float:
        """Bytes that a token costs in all layers together, forward and backward, metadata included."""
        return sum((layer.payload + layer.metadata) / layer.num_tokens for layer in self.layers if layer.num_tokens)

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


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")
