"""Which exchange of keys and values is quickest, by its sizes, the link and the memory. Pure.

Both passes of each schedule run on a virtual clock: a link carries one message after the other, each for its latency
and its bytes, while compute goes on; a wait for a message that has not come is exposed. What is issued before what is
waited for is as in gathering.py and ring.py; a test runs those on the same clock, and finds the same seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from ds_hybrid.attention.traffic import KVShape, Variant, gathered_bytes
from ds_hybrid.dispatch.predict import GroupSpeed

Choice = Literal["whole", "blocks", "ring", "auto"]

SCORES_BYTES = 64 * 2**20
"""Scores that ``"whole"`` holds while values are on their way."""

_NUM_PIECES = (2, 4, 8, 16)
_FEWEST_ROWS = 128
"""Of a piece: smaller ones cost kernels more than they hide."""
_AS_QUICK = 0.02


@dataclass(frozen=True)
class Schedule:
    """Attributes:
    variant: ``"whole"`` gathers all keys, then all values under the scores; ``"blocks"`` gathers pieces; ``"ring"``
        passes shards on from rank to rank.
    num_pieces: of ``"blocks"``, and of the gradients of ``"whole"``.
    in_flight: pieces of ``"blocks"`` that may be under way.
    keep_bytes: what ``"blocks"`` may keep of others' keys and values for a backward, in one layer; the rest is
        gathered again.
    """

    variant: Variant
    num_pieces: int = 8
    in_flight: int = 3
    keep_bytes: int = 0

    def num_kept(self, wire_bytes: int) -> int:
        """Pieces of ``"blocks"`` that stay for a backward, when all together have ``wire_bytes``."""
        return min(self.num_pieces, self.keep_bytes * self.num_pieces // wire_bytes)

    def __str__(self) -> str:
        return f"blocks in {self.num_pieces} pieces" if self.variant == "blocks" else self.variant


@dataclass(frozen=True)
class AttentionShape:
    """One layer on one rank.

    Attributes:
        kv: its keys and values.
        num_heads: of queries.
        causal: half of the scores.
        window: at most so many keys for each query, or twice as many where it is not causal.
    """

    kv: KVShape
    num_heads: int
    causal: bool
    window: int | None = None

    @property
    def num_pairs(self) -> float:
        """(query, key) pairs of a rank and head, of all sequences."""
        length = self.kv.num_ranks * self.kv.shard_length
        keys = length / 2 if self.causal else float(length)
        if self.window is not None:
            keys = min(keys, self.window if self.causal else 2 * self.window)
        return self.kv.batch_size * self.kv.shard_length * keys

    def seconds(self, num_dims: int, matmul_flops: float) -> float:
        """Of matrix products between these pairs and so many dimensions of each head."""
        return 2 * self.num_heads * self.num_pairs * num_dims / matmul_flops


@dataclass(frozen=True)
class Timeline:
    """Seconds of one pass. ``busy``: of the link. ``exposed``: those of them that compute waited for."""

    total: float
    busy: float
    exposed: float

    @property
    def hidden(self) -> float:
        """The fraction of the link's time that compute did not wait for."""
        return 1 - self.exposed / self.busy if self.busy else 1.0


class Clock:
    """Of one rank: its compute, and a link that carries one message after the other."""

    def __init__(self, speed: GroupSpeed) -> None:
        self._speed = speed
        self.now = self._free = self.busy = self.exposed = 0.0

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def send(self, num_bytes: float) -> float:
        """When it will have arrived."""
        seconds = self._speed.latency + num_bytes / self._speed.bandwidth
        self._free = max(self.now, self._free) + seconds
        self.busy += seconds
        return self._free

    def wait(self, arrival: float) -> None:
        self.exposed += max(0.0, arrival - self.now)
        self.now = max(self.now, arrival)

    def read(self) -> Timeline:
        return Timeline(self.now, self.busy, self.exposed)


def forecast(
    schedule: Schedule, attention: AttentionShape, speed: GroupSpeed, matmul_flops: float
) -> tuple[Timeline, Timeline]:
    """Forward and backward of one layer. Only matrix products take time; ranks are alike."""
    clocks = Clock(speed), Clock(speed)
    for run, clock in zip(_PASSES[schedule.variant], clocks, strict=True):
        run(schedule, attention, clock, matmul_flops)
    forward, backward = (clock.read() for clock in clocks)
    return forward, backward


def choose(
    choice: Choice,
    attention: AttentionShape,
    *,
    speed: GroupSpeed,
    matmul_flops: float,
    memory_bytes: int | None = None,
) -> tuple[Schedule, str]:
    """The schedule, and why, in words.

    Of schedules that are quickest to 2 %, the one that holds the least, or, where a limit says what may be held, the
    one that leaves the link free the longest. ``"auto"`` does not take ``"whole"``, which
    holds everything and hides least.

    Args:
        choice: ``"auto"``, or a variant that is taken whatever it costs.
        speed: of the links of the group, the same figures on every rank.
        matmul_flops: per second of a rank.
        memory_bytes: what others' keys, values and gradients may take in this layer. What is left of it beside those
            on their way may be kept for backward. None: no limit on those, and nothing is kept.
    """
    if attention.kv.num_ranks == 1:
        return Schedule("ring"), "one rank holds the whole sequence: nothing is exchanged"
    candidates = [
        _keeping(schedule, attention, memory_bytes)
        for schedule in _candidates(attention)
        if choice in ("auto", schedule.variant) and (schedule.variant != "whole" or choice == "whole")
    ]
    passes = {schedule: forecast(schedule, attention, speed, matmul_flops) for schedule in candidates}
    seconds = {schedule: sum(timeline.total for timeline in both) for schedule, both in passes.items()}
    fitting = [s for s in candidates if memory_bytes is None or held_bytes(s, attention) <= memory_bytes]
    limit = "" if memory_bytes is None else f" within {_megabytes(memory_bytes)}"
    if not fitting:
        best = min(candidates, key=lambda schedule: held_bytes(schedule, attention))
        return best, f"{best}: nothing stays{limit}, this holds the least, {_megabytes(held_bytes(best, attention))}"
    quickest = min(seconds[schedule] for schedule in fitting)
    quick = [schedule for schedule in fitting if seconds[schedule] <= quickest * (1 + _AS_QUICK)]
    if memory_bytes is None:
        best = min(quick, key=lambda schedule: (held_bytes(schedule, attention), seconds[schedule]))
    else:
        best = min(quick, key=lambda schedule: sum(timeline.busy for timeline in passes[schedule]))
    exposed = sum(timeline.exposed for timeline in passes[best])
    return best, _reason(best, choice, seconds, exposed, attention.kv) + limit


def held_bytes(schedule: Schedule, attention: AttentionShape) -> int:
    """Keys, values and gradients of other ranks that a layer holds at its fullest, as they travel."""
    kv = attention.kv
    everything = gathered_bytes(kv)
    gradients = kv.num_ranks * kv.shard_length * kv.token_gradient_bytes
    if schedule.variant == "ring":  # of each: what is computed with, what leaves, what comes
        return 3 * (everything + gradients) // kv.num_ranks
    under_way = min(schedule.in_flight + 1, schedule.num_pieces)
    going = under_way * gradients // schedule.num_pieces
    if schedule.variant == "whole":
        return everything + going
    kept = schedule.num_kept(everything)
    return min(kept + under_way, schedule.num_pieces) * everything // schedule.num_pieces + going


def _candidates(attention: AttentionShape) -> Iterator[Schedule]:
    yield Schedule("ring")
    yield Schedule("whole")
    for num_pieces in _NUM_PIECES:
        if num_pieces == _NUM_PIECES[0] or attention.kv.shard_length >= num_pieces * _FEWEST_ROWS:
            yield Schedule("blocks", num_pieces=num_pieces)


def _keeping(schedule: Schedule, attention: AttentionShape, memory_bytes: int | None) -> Schedule:
    """The same, keeping what the limit leaves beside what is on its way."""
    if schedule.variant != "blocks" or memory_bytes is None:
        return schedule
    return replace(schedule, keep_bytes=max(0, memory_bytes - held_bytes(schedule, attention)))


def _reason(best: Schedule, choice: Choice, seconds: dict[Schedule, float], exposed: float, kv: KVShape) -> str:
    words = f"{best}: {_milliseconds(seconds[best])} a layer, forward and backward, {_milliseconds(exposed)} exposed"
    kept = best.num_kept(gathered_bytes(kv)) if best.variant == "blocks" else 0
    if kept:
        words += f", {kept} pieces kept for backward"
    if choice != "auto":
        return f"{words} (asked for)"
    others = [f"{schedule} {_milliseconds(time)}" for schedule, time in seconds.items() if schedule != best]
    return f"{words}; others: {', '.join(others)}"


def _forward_products(attention: AttentionShape, matmul_flops: float) -> tuple[float, float]:
    """Seconds of all scores, and of all weighted sums."""
    kv = attention.kv
    return attention.seconds(kv.head_dim, matmul_flops), attention.seconds(kv.value_head_dim, matmul_flops)


def _backward_products(attention: AttentionShape, matmul_flops: float) -> float:
    """Seconds of the scores again, of their gradients, and of those of queries, keys and values."""
    scores, sums = _forward_products(attention, matmul_flops)
    return 3 * scores + 2 * sums


def _whole_forward(schedule: Schedule, attention: AttentionShape, clock: Clock, matmul_flops: float) -> None:
    kv = attention.kv
    scores, sums = _forward_products(attention, matmul_flops)
    held = min(1.0, SCORES_BYTES / (4 * attention.num_heads * attention.num_pairs))
    sent = (kv.num_ranks - 1) * kv.shard_length * kv.batch_size
    clock.wait(clock.send(sent * kv.key_wire_bytes))
    values = clock.send(sent * kv.value_wire_bytes)
    clock.compute(held * scores)
    clock.wait(values)
    clock.compute(held * sums + (1 - held) * (scores + sums))


def _whole_backward(schedule: Schedule, attention: AttentionShape, clock: Clock, matmul_flops: float) -> None:
    _gathered_backward(replace(schedule, keep_bytes=gathered_bytes(attention.kv)), attention, clock, matmul_flops)


def _blocks_forward(schedule: Schedule, attention: AttentionShape, clock: Clock, matmul_flops: float) -> None:
    own = sum(_forward_products(attention, matmul_flops)) / attention.kv.num_ranks
    piece = own * (attention.kv.num_ranks - 1) / schedule.num_pieces
    coming = _gathers(schedule, attention, clock, schedule.num_pieces)
    clock.compute(own)
    for _ in coming:
        clock.compute(piece)


def _gathered_backward(schedule: Schedule, attention: AttentionShape, clock: Clock, matmul_flops: float) -> None:
    kv = attention.kv
    own = _backward_products(attention, matmul_flops) / kv.num_ranks
    piece = own * (kv.num_ranks - 1) / schedule.num_pieces
    piece_bytes = (kv.num_ranks - 1) * kv.shard_length * kv.token_gradient_bytes / schedule.num_pieces
    num_kept = schedule.num_kept(gathered_bytes(kv))
    coming = _gathers(schedule, attention, clock, schedule.num_pieces - num_kept)
    clock.compute(own / 2)
    going: deque[float] = deque()
    for number in range(schedule.num_pieces):
        if number >= num_kept:
            next(coming)
        clock.compute(piece)
        going.append(clock.send(piece_bytes))
        if len(going) > schedule.in_flight:
            clock.wait(going.popleft())
    clock.compute(own / 2)
    for arrival in going:
        clock.wait(arrival)


def _gathers(schedule: Schedule, attention: AttentionShape, clock: Clock, num_gathers: int) -> Iterator[None]:
    """Steps from arrival to arrival; the first gathers leave at once."""
    kv = attention.kv
    piece_bytes = (kv.num_ranks - 1) * kv.shard_length * kv.token_wire_bytes / schedule.num_pieces
    going = deque(clock.send(piece_bytes) for _ in range(min(schedule.in_flight, num_gathers)))

    def arrivals() -> Iterator[None]:
        for number in range(num_gathers):
            clock.wait(going.popleft())
            if number + schedule.in_flight < num_gathers:
                going.append(clock.send(piece_bytes))
            yield

    return arrivals()


def _ring_forward(schedule: Schedule, attention: AttentionShape, clock: Clock, matmul_flops: float) -> None:
    kv = attention.kv
    own = sum(_forward_products(attention, matmul_flops)) / kv.num_ranks
    shard_bytes = kv.shard_length * kv.token_wire_bytes
    for _ in range(kv.num_ranks - 1):
        coming = clock.send(shard_bytes)
        clock.compute(own)
        clock.wait(coming)
    clock.compute(own)


def _ring_backward(schedule: Schedule, attention: AttentionShape, clock: Clock, matmul_flops: float) -> None:
    kv = attention.kv
    own = _backward_products(attention, matmul_flops) / kv.num_ranks
    shard_bytes, gradient_bytes = kv.shard_length * kv.token_wire_bytes, kv.shard_length * kv.token_gradient_bytes
    coming = clock.send(shard_bytes)
    clock.compute(own / 2)
    clock.wait(coming)
    if kv.num_ranks > 2:
        coming = clock.send(shard_bytes)
    going = 0.0
    for step in range(1, kv.num_ranks):
        clock.compute(own)
        clock.wait(going)
        if step + 1 < kv.num_ranks:
            clock.wait(coming)
        if step + 2 < kv.num_ranks:
            coming = clock.send(shard_bytes)
        going = clock.send(gradient_bytes)
    clock.compute(own / 2)
    clock.wait(going)


_PASSES = MappingProxyType(
    {
        "whole": (_whole_forward, _whole_backward),
        "blocks": (_blocks_forward, _gathered_backward),
        "ring": (_ring_forward, _ring_backward),
    }
)
"""Forward and backward of each variant."""


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3g} MB"
