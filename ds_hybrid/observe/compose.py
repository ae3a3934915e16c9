"""Records from what a run has measured. Pure: no rank, no file, no clock."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ds_hybrid.dispatch.choose import DispatcherChange
from ds_hybrid.observe.events import (
    AttentionStep,
    DispatcherRecord,
    GainRecord,
    GpuTraffic,
    LayerDecision,
    LayerStep,
    RebalanceRecord,
    Record,
    StepRecord,
)
from ds_hybrid.observe.nvlink import NotAvailable, NvlinkUse
from ds_hybrid.observe.stats import LayerStats, MoEStats
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.look import Look
from ds_hybrid.rebalance.policy import LayerOutlook

SECRETS: Final = frozenset(
    {"apikey", "auth", "authorization", "credential", "passphrase", "passwd", "password", "pwd", "secret", "webhook"}
)
"""Words of a key that name a secret, or several with an s."""

SECRET_ENDS: Final = frozenset({"key", "token"})
"""Those that do as the last word alone: a ``key_size`` is none."""

_USER_IN_URL: Final = re.compile(r"(?<=://)[^/?#\s]+@")
_BETWEEN_WORDS = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")


@dataclass(frozen=True)
class Progress:
    """Where a run is: optimizer steps and samples so far."""

    step: int
    samples: int


@dataclass(frozen=True)
class AttentionReport:
    """What attention over shared sequences sent from one rank in training, and how long it waited for others'."""

    wire_bytes: int
    exposed_seconds: float


@dataclass(frozen=True)
class RankReport:
    """What each rank knows alone.

    Attributes:
        loss: the sum of what backward was given, for ``num_losses`` micro-batches; for as many steps, where it was
            given parts of the loss of a step.
        host_memory, accelerator_memory: see :class:`ds_hybrid.observe.events.StepRecord`.
        host: the name of the rank's host.
        nvlink: the use of that host's GPUs, told by one rank of it.
        attention: None where no ranks share sequences.
    """

    loss: float
    num_losses: int
    host_memory: int
    accelerator_memory: int | None
    host: str
    nvlink: NvlinkUse | None = None
    attention: AttentionReport | None = None


def without_secrets(document: Any) -> Any:
    """A document as JSON, whose keys that name secrets have lost their values, and URLs their users and passwords.

    What JSON lacks is there in words.
    """
    if isinstance(document, Mapping):
        return {
            str(key): "(left out)" if _names_secret(str(key)) and value is not None else without_secrets(value)
            for key, value in document.items()
        }
    if isinstance(document, list | tuple):
        return [without_secrets(value) for value in document]
    if document is None or isinstance(document, int | float):
        return document
    return _USER_IN_URL.sub("(left out)@", str(document))


def _names_secret(key: str) -> bool:
    words = [word.lower() for word in _BETWEEN_WORDS.split(key) if word]
    return not SECRETS.isdisjoint(word.removesuffix("s") for word in words) or not SECRET_ENDS.isdisjoint(words[-1:])


def slots(placement: ExpertPlacement) -> tuple[tuple[int, ...], ...]:
    """[P][E/P], the experts of each place."""
    return tuple(map(tuple, placement.expert_of_slot.tolist()))


def longest_placed(since: Sequence[tuple[int, ExpertPlacement]], until: int) -> ExpertPlacement:
    """Where a layer's experts were in most of the steps.

    Args:
        since: after which step they came where, the first at the beginning.
        until: the last step.
    """
    ends = [*(step for step, _ in since[1:]), until]
    return max(zip(since, ends, strict=True), key=lambda each: each[1] - each[0][0])[0][1]


def step_record(
    stats: MoEStats,
    placements: Mapping[str, ExpertPlacement],
    top_k: Mapping[str, int],
    reports: Sequence[RankReport],
    progress: Progress,
    *,
    time: float,
    num_steps: int,
    seconds: float,
    lr: Sequence[float],
) -> StepRecord:
    """What the training of ``num_steps`` steps did.

    Args:
        stats: of training alone, all ranks together.
        placements, top_k: by layer.
        reports: of each of the R ranks.
        lr: by parameter group.
    """
    tokens = max((sum(layer.expert_load) // top_k[layer.name] for layer in stats.layers), default=0)
    num_losses = sum(report.num_losses for report in reports)
    on_accelerator = [report.accelerator_memory for report in reports if report.accelerator_memory is not None]
    return StepRecord(
        time=time,
        step=progress.step,
        samples=progress.samples,
        num_steps=num_steps,
        seconds=seconds,
        loss=sum(report.loss for report in reports) / num_losses if num_losses else None,
        lr=tuple(map(float, lr)),
        tokens=tokens,
        tokens_per_second=tokens / seconds if tokens and seconds > 0 else None,
        exposed_fraction=stats.exposed_seconds / (len(reports) * seconds) if seconds > 0 else None,
        load_max_over_mean=_known(stats.load_max_over_mean),
        wire_bytes_per_token=stats.wire_bytes_per_token if tokens else None,
        lower_bound_ratio=_known(stats.lower_bound_ratio),
        layers=tuple(_layer_step(layer, placements[layer.name]) for layer in stats.layers),
        attention=_attention_step([report.attention for report in reports if report.attention is not None], seconds),
        host_memory=tuple(report.host_memory for report in reports),
        accelerator_memory=tuple(on_accelerator) or None,
        nvlink=tuple(traffic for report in reports for traffic in _traffic(report)),
    )


def _layer_step(stats: LayerStats, placement: ExpertPlacement) -> LayerStep:
    rank_load = np.array(stats.expert_load)[placement.expert_of_slot].sum(1).tolist()
    return LayerStep(
        name=stats.name,
        mode=stats.mode,
        load=stats.expert_load,
        load_max_over_mean=_known(stats.load_max_over_mean),
        load_entropy=relative_entropy(stats.expert_load),
        rank_load=tuple(rank_load),
        rank_load_max_over_mean=max_over_mean(rank_load),
        expert_seconds=stats.expert_seconds,
        expert_time_max_over_mean=max_over_mean(stats.expert_seconds),
        arrived=stats.arrived,
        wire_bytes={str(mode): sent for mode, sent in stats.wire_bytes_by_mode.items()},
        lower_bound=stats.lower_bound,
        lower_bound_ratio=_known(stats.lower_bound_ratio),
        exposed_seconds=stats.exposed_seconds,
    )


def _attention_step(of_ranks: Sequence[AttentionReport], seconds: float) -> AttentionStep | None:
    if not of_ranks:
        return None
    exposed = sum(sent.exposed_seconds for sent in of_ranks)
    return AttentionStep(
        wire_bytes=sum(sent.wire_bytes for sent in of_ranks),
        exposed_seconds=exposed,
        exposed_fraction=exposed / (len(of_ranks) * seconds) if seconds > 0 else None,
    )


def relative_entropy(counts: Sequence[int]) -> float | None:
    """Shannon entropy of the shares over the log of their number: from 0, all in one, to 1, even. None without any."""
    total = sum(counts)
    if not total or len(counts) < 2:
        return None
    shares = [count / total for count in counts if count]
    return -sum(share * math.log(share) for share in shares) / math.log(len(counts))


def max_over_mean(values: Sequence[float]) -> float | None:
    """The largest over the mean; None where all are 0."""
    total = sum(values)
    return max(values) * len(values) / total if total else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _traffic(report: RankReport) -> list[GpuTraffic]:
    if report.nvlink is None or isinstance(report.nvlink, NotAvailable):
        return []
    return [
        GpuTraffic(host=report.host, gpu=gpu, reason=use.reason)
        if isinstance(use, NotAvailable)
        else GpuTraffic(host=report.host, gpu=gpu, sent=use.sent, received=use.received, fraction=use.fraction)
        for gpu, use in report.nvlink.items()
    ]


def dispatcher_records(changes: Sequence[DispatcherChange], *, time: float, step: int) -> list[Record]:
    """One for each layer that changed its dispatcher."""
    return [
        DispatcherRecord(
            time=time,
            step=step,
            layer=change.layer,
            before=change.before,
            after=change.after,
            predicted_seconds={str(mode): seconds for mode, seconds in change.predicted.items()},
            reason=change.reason,
        )
        for change in changes
    ]


def rebalance_records(look: Look, placements: Mapping[str, ExpertPlacement], *, time: float, step: int) -> list[Record]:
    """What was measured of earlier moves, and the decision; ``placements`` are those after it, by layer."""
    gains: list[Record] = [
        GainRecord(
            time=time,
            step=step,
            layer=gain.layer,
            moved_at=gain.moved_at,
            predicted=gain.predicted,
            measured=gain.measured,
        )
        for gain in look.gains
    ]
    move = look.move
    decision = RebalanceRecord(
        time=time,
        step=step,
        action=look.outcome,
        decisions=tuple(_decision(layer, outlook) for layer, outlook in look.outlooks.items()),
        reason=look.reason,
        num_moved=0 if move is None else move.num_moved,
        seconds=None if move is None else move.seconds,
        predicted_seconds=None if move is None else move.predicted_seconds,
        bytes_sent=None if move is None else move.bytes_sent,
        placements={} if move is None else {layer: slots(placements[layer]) for layer in move.layers},
    )
    return [*gains, decision]


def _decision(layer: str, outlook: LayerOutlook) -> LayerDecision:
    return LayerDecision(
        layer=layer,
        load_before=outlook.imbalance_before,
        load_after=outlook.imbalance_after,
        load_bound=outlook.bound,
        hottest_expert=outlook.hottest_expert,
        hottest_load=outlook.hottest_load,
        num_moved=outlook.num_moved,
        num_moved_across=outlook.num_moved_across,
        predicted_gain=outlook.gain_seconds_per_step,
        predicted_cost=outlook.cost_seconds,
        pays=outlook.pays,
        reason=outlook.reason,
    )
