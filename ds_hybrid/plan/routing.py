"""How uneven routing is, and what each expert-parallel rank gets of it: by a law, or by a recorded trace. Pure NumPy.

Symbols: E experts, K of them per token, P expert-parallel ranks, D draws. A draw is how popular each expert is in one
layer at one time. A law such as Zipf's says how popular, not which expert: each draw has them in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ds_hybrid.errors import ConfigError
from ds_hybrid.plan.model import ModelShape
from ds_hybrid.problems import show
from ds_hybrid.rebalance.trace import is_trace, read_trace

FloatArray = npt.NDArray[np.float64]

NUM_DRAWS = 512
_NUM_SAMPLED_TOKENS = 16384
_NUM_RUNS = 200


@dataclass(frozen=True, eq=False)
class RankDemand:
    """What the P ranks of a group get of one token of each rank, experts in consecutive blocks.

    Attributes:
        pairs: [P]: (token, choice) pairs, K in all; of the draw whose busiest rank is typical.
        rows: [P]: the chance that a token needs the rank; of the same draw.
        rows_to_node: [N]: the chance that it needs a node, a run of P/N ranks; of the same draw.
        load: pairs of the busiest rank over the mean of the ranks, mean over the draws.
        load_p99: the same, 99th percentile over layers.
        load_of_model_p99: the same of a rank's pairs in all layers together, 99th percentile over runs.
        rows_p99: the largest entry of ``rows``, 99th percentile over layers.
    """

    pairs: FloatArray
    rows: FloatArray
    rows_to_node: FloatArray
    load: float
    load_p99: float
    load_of_model_p99: float
    rows_p99: float


@dataclass(frozen=True, eq=False)
class RoutingLaw:
    """Popularity of experts.

    Attributes:
        name: as the user gave it.
        inclusion: [D, E]: the chance that a token picks each expert; each draw sums to K.
        num_layers: MoE layers of the model.
    """

    name: str
    inclusion: FloatArray
    num_layers: int

    @cached_property
    def top_k(self) -> int:
        return round(float(self.inclusion[0].sum()))

    def demand(self, num_ranks: int, num_nodes: int = 1) -> RankDemand:
        """Of groups of ``num_ranks``, which divides E, over ``num_nodes`` nodes, which divides it."""
        blocks = self.inclusion.reshape(len(self.inclusion), num_ranks, -1)
        pairs, rows = blocks.sum(2), chance_of_need(blocks, self.top_k)
        load = pairs.max(1) * num_ranks / self.top_k
        typical = int(np.abs(load - load.mean()).argmin())
        layers = np.random.default_rng(0).integers(len(pairs), size=(_NUM_RUNS, self.num_layers))
        of_model = pairs[layers].mean(1).max(1) * num_ranks / self.top_k
        return RankDemand(
            pairs=pairs[typical],
            rows=rows[typical],
            rows_to_node=chance_of_need(self.inclusion[typical].reshape(1, num_nodes, -1), self.top_k)[0],
            load=float(load.mean()),
            load_p99=float(np.quantile(load, 0.99)),
            load_of_model_p99=float(np.quantile(of_model, 0.99)),
            rows_p99=float(np.quantile(rows.max(1), 0.99)),
        )


def chance_of_need(blocks: FloatArray, top_k: int) -> FloatArray:
    """The chance that a token picks at least one expert of a block: [D, P, E/P] -> [D, P].

    Experts of a block are ruled out one after the other; the K picks then fall on those that are left, in proportion.
    Exact when all are equally likely, where it is 1 - C(E - E/P, K) / C(E, K), and for K = 1; within 0.03 of sampled
    tokens under the skews of the tests.
    """
    ruled_out = blocks.cumsum(2) - blocks
    left = np.maximum(top_k - ruled_out, 1e-12)
    chances: FloatArray = 1 - np.prod(1 - np.minimum(blocks * top_k / left, 1), axis=2)
    return chances


def limits_left_out(model: ModelShape) -> list[str]:
    """A line for people about what the laws do not know of the model's router, if there is anything."""
    if model.routing_groups is None:
        return []
    chosen, of_all = model.routing_groups
    return [
        f"Left out: {model.name} takes a token's experts from {chosen} of {of_all} groups. Rows between hosts, of "
        "hierarchical and two_stage above all, are predicted too many."
    ]


def read_routing(text: str, model: ModelShape, *, where: str = "--routing ") -> RoutingLaw:
    """``uniform``, ``zipf:S`` with an exponent S, or a trace: a .npz file with ``counts`` [steps, layers, E], or the
    directory of a run that recorded one.

    Zipf's law is the prior of the choice: the experts with the K largest log(place ** -S) + Gumbel noise are taken.

    Args:
        where: what messages begin with, before the text.

    Raises:
        ConfigError: it is none of these, or the trace is of another number of experts.
        PlacementError: the file is no trace.
    """
    kind, _, exponent = text.partition(":")
    if text == "uniform":
        inclusion = np.full((1, model.num_experts), model.top_k / model.num_experts)
    elif kind == "zipf":
        inclusion = _zipf(_exponent(exponent, f"{where}{show(text)}"), model)
    elif is_trace(text):
        inclusion = _of_trace(text, model, f"{where}{text}")
    else:
        raise ConfigError(f"{where}{show(text)}: must be uniform, zipf:S such as zipf:1.0, or a trace's .npz file.")
    return RoutingLaw(text, inclusion, model.num_moe_layers)


def _exponent(text: str, where: str) -> float:
    try:
        exponent = float(text)
    except ValueError:
        exponent = -1.0
    if not 0 <= exponent <= 10:
        raise ConfigError(f"{where}: the exponent must be a number from 0 to 10, such as zipf:1.0.")
    return exponent


def _zipf(exponent: float, model: ModelShape) -> FloatArray:
    rng = np.random.default_rng(0)
    prior = -exponent * np.log(np.arange(1, model.num_experts + 1))
    scores = prior + rng.gumbel(size=(_NUM_SAMPLED_TOKENS, model.num_experts))
    picks = np.argpartition(-scores, model.top_k - 1, axis=1)[:, : model.top_k]
    inclusion = np.bincount(picks.ravel(), minlength=model.num_experts) / _NUM_SAMPLED_TOKENS
    return rng.permuted(np.tile(inclusion, (NUM_DRAWS, 1)), axis=1)


def _of_trace(path: str, model: ModelShape, where: str) -> FloatArray:
    trace = read_trace(path)
    counts = trace.counts
    if counts.shape[2] != model.num_experts:
        raise ConfigError(
            f"{where}: a trace of {counts.shape[2]} experts, but {model.name} has {model.num_experts}. "
            "Record one of this model, or give zipf:S."
        )
    if trace.top_k not in (None, model.top_k):
        raise ConfigError(
            f"{where}: a trace of {trace.top_k} choices of a token, but {model.name} has {model.top_k}. "
            "Record one of this model, or give zipf:S."
        )
    draws = counts.reshape(-1, counts.shape[2])
    draws = draws[np.linspace(0, len(draws) - 1, min(NUM_DRAWS, len(draws))).astype(int)]
    inclusion = model.top_k * draws / draws.sum(1, keepdims=True)
    if inclusion.max() > 1:
        raise ConfigError(
            f"{where}: an expert has more than 1 of {model.top_k} choices of a token, so the trace is of a "
            f"model with a smaller top-k than {model.name}. Record one of this model, or give zipf:S."
        )
    return inclusion
