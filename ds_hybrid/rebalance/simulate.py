"""Replays a routing trace: what rebalancing would have done for the ranks, without a machine to run on."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds_hybrid.errors import PlacementError
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.algorithms import Algorithm, FloatArray
from ds_hybrid.rebalance.load import ExpertLoad
from ds_hybrid.rebalance.policy import Costs, propose

BYTES_PER_PARAMETER = 2 + 12
"""bf16 weight, fp32 master, and Adam's two moments; there are no gradients at a step's end."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Who was routed where.

    Attributes:
        counts: [T, L, E] int64: (token, choice) pairs of each step, layer and expert.
        expert_parameters: parameters of one expert, if the trace tells.
        top_k: choices of a token, if the trace tells and all its layers have as many.
    """

    counts: npt.NDArray[np.int64]
    expert_parameters: int | None = None
    top_k: int | None = None


def read_trace(path: str | Path) -> Trace:
    """A ``.npz`` file with an array ``counts`` [T, L, E] of integers, and perhaps the text ``meta``, a dict.

    Raises:
        PlacementError: the file is something else.
        OSError: it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            counts, meta = arrays.get("counts"), str(arrays.get("meta", "{}"))
            names = ", ".join(arrays.files) or "none"
    except (ValueError, zipfile.BadZipFile, EOFError, AttributeError, TypeError) as error:
        raise PlacementError(f"{path}: not a .npz file of plain arrays. Write it with numpy.savez.") from error
    if counts is None:
        raise PlacementError(f"{path}: has no array counts, but {names}. counts must be [steps, layers, experts].")
    shape = f"{counts.dtype} {list(counts.shape)}"
    if counts.ndim != 3 or not counts.size or counts.dtype.kind not in "iu":
        raise PlacementError(f"{path}: counts is {shape}, must be integers [steps, layers, experts], none of them 0.")
    counts = counts.astype(np.int64)
    if (counts < 0).any():
        raise PlacementError(f"{path}: counts ({shape}) has {counts.min()}, must be 0 or more.")
    empty = np.argwhere(counts.sum(-1) == 0)
    if len(empty):
        step, layer = empty[0]
        raise PlacementError(f"{path}: counts ({shape}) is 0 for all experts of layer {layer} at step {step}.")
    return Trace(counts, _expert_parameters(meta), _top_k(meta))


def _expert_parameters(meta: str) -> int | None:
    """Two matrices between the widths d and h, as the traces' models have."""
    try:
        settings = ast.literal_eval(meta)
        return 2 * int(settings["d"]) * int(settings["h"])
    except (ValueError, SyntaxError, KeyError, TypeError):
        return None


def _top_k(meta: str) -> int | None:
    """``k``, or ``top_k`` of each layer."""
    try:
        settings = ast.literal_eval(meta)
        of_layers = settings["top_k"] if "top_k" in settings else settings["k"]
        numbers = {int(number) for number in (of_layers if isinstance(of_layers, list) else [of_layers])}
    except (ValueError, SyntaxError, KeyError, TypeError):
        return None
    return numbers.pop() if len(numbers) == 1 else None


@dataclass(frozen=True)
class Balance:
    """How even the ranks were: means over layers and blocks of steps.

    Attributes:
        spread: percent: how far the rank farthest from the mean, above or below, is from it.
        max_over_mean: the busiest rank over the mean.
        critical_path: the layers' busiest ranks together over their means together; the pace of the run.
        card_total: percent: the spread of each rank's sum over all layers.
    """

    spread: float
    max_over_mean: float
    critical_path: float
    card_total: float


@dataclass(frozen=True)
class LayerResult:
    """One layer before (never rebalanced) and after; its moves."""

    spread_before: float
    spread_after: float
    max_over_mean_before: float
    max_over_mean_after: float
    num_moves: int
    num_moves_across: int


@dataclass(frozen=True, eq=False)
class Replay:
    """What became of a trace.

    Attributes:
        before: with the experts left where they were.
        after: rebalanced.
        layers: the same for each layer.
        num_rebalances: how often it was decided.
        moved_fraction: [num_rebalances]: the experts that moved each time, of all.
        num_steps: steps that were scored.
        max_over_mean: [2, L, blocks]: before and after, over the steps.
        first_step: where scoring and rebalancing began.
    """

    before: Balance
    after: Balance
    layers: tuple[LayerResult, ...]
    moved_fraction: tuple[float, ...]
    num_steps: int
    max_over_mean: FloatArray
    first_step: int

    @property
    def num_rebalances(self) -> int:
        return len(self.moved_fraction)

    @property
    def num_moves(self) -> int:
        return sum(layer.num_moves for layer in self.layers)

    @property
    def num_moves_across(self) -> int:
        return sum(layer.num_moves_across for layer in self.layers)


def replay(
    trace: Trace,
    *,
    ep_size: int,
    algorithm: Algorithm,
    interval: int,
    half_life: float,
    min_gain: float,
    horizon: int,
    kappa: float = 0.0,
    start: int | None = None,
    average_over: int = 100,
    node_of_rank: Sequence[int] = (),
    cross_node_penalty: float = 1.0,
) -> Replay:
    """Rebalances a trace and scores it.

    Up to ``start`` the loads are only listened to. There the experts are contiguous; at once, and then every
    ``interval`` steps, every layer is planned from the counts of the steps before, and keeps that placement until the
    next time. Scored are whole blocks of ``average_over`` steps from ``start`` on: each rank's loads of a block are
    added up before the metric is taken, which imitates a batch of that size.

    Args:
        ep_size: ranks, a divisor of the number of experts.
        half_life: steps after which a count weighs half in the forecast.
        min_gain: smallest fall of a busiest rank's forecast load that moves experts, as a fraction of the mean.
        horizon: steps over which a move must earn its cost back.
        kappa: what moving one expert inside a node costs, as a multiple of a balanced step of its layer.
        start: default: half of the trace.
        node_of_rank: for each rank its node; empty is one node.
        cross_node_penalty: what a move across nodes costs compared with one inside.

    Raises:
        PlacementError: ``ep_size`` does not divide the experts, or less than a block is left to score.
    """
    num_steps, num_layers, num_experts = trace.counts.shape
    first = num_steps // 2 if start is None else start
    num_blocks = (num_steps - first) // average_over
    if first < 0 or num_blocks < 1:
        raise PlacementError(
            f"the trace has {num_steps} steps: start {first} must be at least 0 and leave {average_over} steps to "
            f"average over. Take another start, fewer steps to average over, or a longer trace."
        )
    contiguous = ExpertPlacement.contiguous(num_experts, ep_size)
    layers = [
        _replay_layer(
            trace.counts[: first + num_blocks * average_over, layer],
            contiguous,
            algorithm=algorithm,
            first=first,
            interval=interval,
            half_life=half_life,
            min_gain=min_gain,
            horizon=horizon,
            costs=_costs(trace.counts[:, layer], ep_size, kappa, cross_node_penalty),
            node_of_rank=node_of_rank,
            cross_node_penalty=cross_node_penalty,
        )
        for layer in range(num_layers)
    ]
    loads = np.stack([layer.rank_loads for layer in layers], axis=2)  # [2, T, L, P]
    blocks = loads.reshape(2, num_blocks, average_over, num_layers, ep_size).sum(2)
    ratios = blocks / blocks.mean(-1, keepdims=True)
    spreads = 100 * np.abs(ratios - 1).max(-1).mean(1)  # [2, L]
    busiest = ratios.max(-1)
    return Replay(
        before=_balance(blocks[0]),
        after=_balance(blocks[1]),
        layers=tuple(
            LayerResult(
                spread_before=float(spreads[0, index]),
                spread_after=float(spreads[1, index]),
                max_over_mean_before=float(busiest[0, :, index].mean()),
                max_over_mean_after=float(busiest[1, :, index].mean()),
                num_moves=sum(layer.num_moved),
                num_moves_across=sum(layer.num_moved_across),
            )
            for index, layer in enumerate(layers)
        ),
        moved_fraction=tuple(
            sum(moved) / (num_layers * num_experts)
            for moved in zip(*(layer.num_moved for layer in layers), strict=True)
        ),
        num_steps=num_blocks * average_over,
        max_over_mean=busiest.transpose(0, 2, 1),
        first_step=first,
    )


@dataclass(frozen=True, eq=False)
class _LayerReplay:
    rank_loads: FloatArray  # [2, scored steps, P]: contiguous, rebalanced
    num_moved: list[int]
    num_moved_across: list[int]


def _replay_layer(
    counts: npt.NDArray[np.int64],
    contiguous: ExpertPlacement,
    *,
    algorithm: Algorithm,
    first: int,
    interval: int,
    half_life: float,
    min_gain: float,
    horizon: int,
    costs: Costs,
    node_of_rank: Sequence[int],
    cross_node_penalty: float,
) -> _LayerReplay:
    load = ExpertLoad.unknown(counts.shape[1], half_life=half_life)
    for step in range(first):
        load = load.after(counts[step])
    placement, scored = contiguous, []
    num_moved, num_moved_across = [], []
    for begin in range(first, len(counts), interval):
        proposed, plan = propose(
            algorithm,
            load.forecast,
            placement,
            costs,
            horizon=horizon,
            min_gain=min_gain,
            node_of_rank=node_of_rank,
            cross_node_penalty=cross_node_penalty,
        )
        placement = proposed if plan.pays else placement
        num_moved.append(plan.num_moved if plan.pays else 0)
        num_moved_across.append(plan.num_moved_across if plan.pays else 0)
        window = counts[begin : begin + interval]
        scored.append(np.stack([_by_rank(window, contiguous), _by_rank(window, placement)]))
        for each in window:
            load = load.after(each)
    return _LayerReplay(np.concatenate(scored, axis=1), num_moved, num_moved_across)


def _by_rank(counts: npt.NDArray[np.int64], placement: ExpertPlacement) -> FloatArray:
    """[T, E] -> [T, P]."""
    loads: FloatArray = counts[:, placement.expert_of_slot].sum(-1).astype(np.float64)
    return loads


def _costs(counts: npt.NDArray[np.int64], ep_size: int, kappa: float, cross_node_penalty: float) -> Costs:
    """In units of a balanced step of the layer."""
    return Costs(
        seconds_per_pair=ep_size * len(counts) / float(counts.sum()),
        seconds_per_move=kappa,
        seconds_per_move_across=kappa * cross_node_penalty,
    )


def _balance(blocks: FloatArray) -> Balance:
    """[blocks, L, P] -> means."""
    ratios = blocks / blocks.mean(-1, keepdims=True)
    totals = blocks.sum(1)
    return Balance(
        spread=float(100 * np.abs(ratios - 1).max(-1).mean()),
        max_over_mean=float(ratios.max(-1).mean()),
        critical_path=float((blocks.max(-1).sum(1) / blocks.mean(-1).sum(1)).mean()),
        card_total=float(100 * np.abs(totals / totals.mean(-1, keepdims=True) - 1).max(-1).mean()),
    )
