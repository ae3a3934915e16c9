"""Which exchange of keys and values is quickest, by its sizes, the link and the memory. Pure.

Both passes of each schedule run on a virtual clock: a link carries one message after the other, each for its latency
and its bytes, while compute goes on; a wait for a message that has not come is exposed. What is issued before what is
waited for is that of kv_gather.py; tests hold the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_hybrid.attention.traffic import KVShape, Variant
from ds_hybrid.dispatch.predict import GroupSpeed

Choice = Literal["whole", "blocks", "ring", "auto"]


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


@dataclass(frozen=True)
class Attention:
    """One layer on one rank.

    Attributes:
        kv: its keys and values.
        num_heads: of queries.
        causal: half of the scores.
    """

    kv: KVShape
    num_heads: int
    causal: bool


def choose(
    choice: Choice,
    attention: Attention,
    *,
    speed: GroupSpeed,
    matmul_flops: float,
    memory_bytes: int | None = None,
) -> tuple[Schedule, str]:
    """The schedule, and why, in words.

    Args:
        choice: ``"auto"``, or a variant that is taken whatever it costs.
        speed: of the links of the group, the same figures on every rank.
        matmul_flops: per second of a rank.
        memory_bytes: what others' keys and values may take at once; None: no limit.
    """
    raise NotImplementedError
