"""How popular each expert is in every step of a run: recorded, or drawn by Zipf's law with drift. Pure NumPy.

Symbols: S steps, L layers, E experts, K of them per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ds_hybrid.errors import ConfigError
from ds_hybrid.plan.model import ModelShape
from ds_hybrid.plan.routing import NUM_DRAWS, RoutingLaw, read_routing
from ds_hybrid.problems import show
from ds_hybrid.rebalance.trace import is_trace, read_trace

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Popularity:
    """Of the experts of each layer, step by step.

    Attributes:
        name: as the user gave it.
        weights: [S, L, E]: in proportion to the pairs that an expert gets; counts of a trace, shares of a law.
        top_k: K.
    """

    name: str
    weights: npt.NDArray[np.floating] | npt.NDArray[np.int64]
    top_k: int

    @property
    def num_layers(self) -> int:
        return int(self.weights.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.weights.shape[2])

    def inclusion(self, first: int, last: int, layer: int) -> FloatArray:
        """[last - first, E]: the chance that a token picks each expert; K in all."""
        weights = self.weights[first:last, layer].astype(np.float64)
        chances: FloatArray = self.top_k * weights / weights.sum(1, keepdims=True)
        return chances

    def law(self) -> RoutingLaw:
        """The popularity of some of its layers and steps, for predictions of a typical one and of a rare one."""
        num_steps, num_layers, num_experts = self.weights.shape
        places = np.linspace(0, num_steps * num_layers - 1, min(NUM_DRAWS, num_steps * num_layers)).astype(int)
        draws = self.weights.reshape(-1, num_experts)[places].astype(np.float64)
        return RoutingLaw(self.name, self.top_k * draws / draws.sum(1, keepdims=True), num_layers)


def read_popularity(text: str, model: ModelShape, *, num_steps: int | None, top_k: int | None = None) -> Popularity:
    """A trace's .npz file, the directory of a run that recorded one, or ``zipf:S[,drift=D]``.

    Zipf's law is that of ``read_routing``, one order of the experts for each layer. With drift every expert has a score
    of mean 0 and variance 1, by whose order the places are given; each step renews the part D of its variance, so after
    n steps the scores correlate by (1 - D) ** (n / 2).

    Args:
        num_steps: of the run; default: those of the trace, or 1000.
        top_k: K of a trace that does not tell it. One that tells neither must have as many experts as the model.

    Raises:
        ConfigError: it is neither; a trace has fewer steps, or an expert with more than one choice of each token.
        PlacementError: the file is no trace.
    """
    if is_trace(text):
        return _of_trace(text, num_steps, top_k, model)
    law, comma, drift = text.partition(",")
    if top_k not in (None, model.top_k) or not law.startswith("zipf:"):
        raise ConfigError(
            f"{show(text)}: must be a trace's .npz file, or zipf:S[,drift=D] such as zipf:1.0,drift=0.01 (--top-k is "
            "for traces alone)."
        )
    shares = np.sort(read_routing(law, model, where="").inclusion[0])[::-1] / model.top_k
    renewed = _drift(drift, text) if comma else 0.0
    return Popularity(text, _drawn(shares, renewed, num_steps or 1000, model.num_moe_layers), model.top_k)


def of_run(model: ModelShape, popularity: Popularity) -> ModelShape:
    """The model with as many experts, and choices, as were routed."""
    return replace(model, num_experts=popularity.num_experts, top_k=popularity.top_k)


def _of_trace(path: str, num_steps: int | None, top_k: int | None, model: ModelShape) -> Popularity:
    trace = read_trace(path)
    counts = trace.counts
    if num_steps is not None and num_steps > len(counts):
        raise ConfigError(f"--steps {num_steps}: {path} has {len(counts)}. Leave it out, or give fewer.")
    if top_k is not None and trace.top_k not in (None, top_k):
        raise ConfigError(f"--top-k {top_k}: {path} was recorded with {trace.top_k}. Leave it out.")
    top_k = top_k or trace.top_k or (model.top_k if counts.shape[2] == model.num_experts else None)
    if top_k is None:
        raise ConfigError(
            f"{path}: does not tell how many of its {counts.shape[2]} experts a token takes, and {model.name} has "
            f"{model.num_experts}. Give the --top-k of the run that it was recorded in."
        )
    counts = counts[:num_steps]
    shares = counts.max(2) / counts.sum(2)
    if shares.max() * top_k > 1:
        raise ConfigError(
            f"{path}: an expert has {shares.max():.3f} of all pairs, more than one choice of {top_k} of every token. "
            "Give the --top-k of the run that it was recorded in."
        )
    return Popularity(path, counts, top_k)


def _drift(text: str, whole: str) -> float:
    key, _, number = text.partition("=")
    try:
        drift = float(number) if key == "drift" else -1.0
    except ValueError:
        drift = -1.0
    if not 0 <= drift <= 1:
        raise ConfigError(f"{show(whole)}: after the comma must be drift=D, a number from 0 to 1, such as drift=0.01.")
    return drift


def _drawn(shares: FloatArray, drift: float, num_steps: int, num_layers: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((num_layers, len(shares)), dtype=np.float32)
    weights = np.empty((num_steps, *scores.shape), dtype=np.float32)
    by_place = np.broadcast_to(shares.astype(np.float32), scores.shape)
    kept, renewed = np.float32((1 - drift) ** 0.5), np.float32(drift**0.5)
    for step in range(num_steps):
        if step == 0 or drift:
            np.put_along_axis(weights[step], scores.argsort(axis=1), by_place, axis=1)
            scores = kept * scores + renewed * rng.standard_normal(scores.shape, dtype=np.float32)
        else:
            weights[step] = weights[0]
    return weights
