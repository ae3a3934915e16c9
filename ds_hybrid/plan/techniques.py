"""What the article's five techniques give by our model, each alone and one after the other. Pure.

The base is plan A's layout without them: attention sharded over TP 4, EP 4, one row for each (token, choice), experts
that stay. Activation checkpoints and a loss in chunks are on throughout. Every layout takes the same sequences in a
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ds_hybrid.dispatch.modes import Mode, WireDtype
from ds_hybrid.errors import ConfigError
from ds_hybrid.plan.popularity import Popularity
from ds_hybrid.plan.simulate import Outcome, Setting, simulate
from ds_hybrid.plan.windows import RebalancePolicy
from ds_hybrid.rebalance.algorithms import Algorithm


@dataclass(frozen=True)
class Choices:
    """What the techniques choose.

    Attributes:
        attention: what the ``tp_size`` ranks of a sequence share out: heads, with all-reduces; or the sequence, with
            gathered keys and values that attention waits for, or that hide under it.
    """

    tp_size: int = 4
    ep_size: int = 4
    mode: Mode = "alltoall"
    wire_dtype: WireDtype = "auto"
    algorithm: Algorithm = "static"
    attention: Literal["heads", "gathers", "hidden_gathers"] = "heads"


@dataclass(frozen=True)
class Prediction:
    """Of one row. Seconds are the mean step of the slowest rank; ``dispatch`` and ``experts`` are parts of ``step``.

    Attributes:
        imbalance: the busiest rank's expert load over the mean, layer by layer; mean over steps.
        wire_bytes: that leave a rank in dispatch, per token that it owns.
        peak_memory: bytes of the rank that needs the most.
    """

    choices: Choices
    tokens_per_second: float
    step: float
    dispatch: float
    experts: float
    imbalance: float
    wire_bytes: float
    num_moves: int
    peak_memory: float


@dataclass(frozen=True)
class Row:
    """One technique: alone on the base, and with those above it; None where it is there for comparison only."""

    technique: str
    alone: Prediction
    together: Prediction | None

    @property
    def peak_memory(self) -> float:
        """Of the row's last prediction: with those above it, where there is one."""
        return (self.together or self.alone).peak_memory


_TECHNIQUES: tuple[tuple[str, Mapping[str, object], bool], ...] = (
    ("base: TP 4, EP 4, alltoall", {}, True),
    ("1. TP 2", {"tp_size": 2}, True),
    ("2a. two_stage dispatch", {"mode": "two_stage"}, True),
    ("2b. fp8 on the wire", {"wire_dtype": "fp8_e4m3"}, True),
    ("3. plan B: EP 8", {"ep_size": 8}, True),
    ("3. plan A: EP on the TP groups", {"mode": "replicated"}, False),
    ("4. article_round_robin", {"algorithm": "article_round_robin"}, False),
    ("4. swap", {"algorithm": "swap"}, True),
    ("5a. sequence sharded, K/V waited for", {"attention": "gathers"}, True),
    ("5b. the same, K/V gather hidden", {"attention": "hidden_gathers"}, True),
)


def techniques(setting: Setting, popularity: Popularity, policy: RebalancePolicy) -> list[Row]:
    """The table; ``setting.tp_size`` and ``wire_dtype`` are the rows' own.

    Raises:
        ConfigError: the layouts do not divide the ranks, experts or heads.
    """
    for what, number, largest in (
        ("ranks", setting.cluster.num_ranks, 8),
        ("experts", setting.model.num_experts, 8),
        ("key and value heads", setting.model.attention.num_kv_heads, 4),
    ):
        if number % largest:
            raise ConfigError(
                f"--article: its layouts share {number} {what} out over {largest} ranks. Give a multiple."
            )
    return list(_rows(replace(setting, checkpoints=True), popularity, policy))


def _rows(setting: Setting, popularity: Popularity, policy: RebalancePolicy) -> Iterator[Row]:
    so_far: dict[str, object] = {}
    for technique, change, joins in _TECHNIQUES:
        alone = _predict(setting, popularity, policy, _with(change))
        if joins:
            so_far |= change
        yield Row(technique, alone, _predict(setting, popularity, policy, _with(so_far)) if joins else None)


def _with(changes: Mapping[str, object]) -> Choices:
    return replace(Choices(), **changes)  # type: ignore[arg-type]


def _predict(setting: Setting, popularity: Popularity, policy: RebalancePolicy, choices: Choices) -> Prediction:
    has_heads = choices.attention == "heads"
    changed = replace(
        setting,
        tp_size=choices.tp_size if has_heads else 1,
        sp_size=1 if has_heads else choices.tp_size,
        micro_batches=choices.tp_size,  # as many ranks share a micro-batch
        hides_gathers=choices.attention != "gathers",
        wire_dtype=choices.wire_dtype,
    )
    (outcome,) = simulate(
        changed,
        popularity,
        modes=[choices.mode],
        ep_sizes=[choices.ep_size],
        policies=[replace(policy, algorithm=choices.algorithm)],
    )
    return _summary(choices, outcome)


def _summary(choices: Choices, outcome: Outcome) -> Prediction:
    return Prediction(
        choices=choices,
        tokens_per_second=outcome.tokens_per_second,
        step=float(outcome.step_seconds.mean()),
        dispatch=float(outcome.dispatch_seconds.mean()),
        experts=float(outcome.expert_seconds.mean()),
        imbalance=float(np.mean(outcome.imbalance)),
        wire_bytes=float(outcome.wire_bytes.mean()) / outcome.tokens_per_step,
        num_moves=outcome.num_moves,
        peak_memory=outcome.peak_memory,
    )
