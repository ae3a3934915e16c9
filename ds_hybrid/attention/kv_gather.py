"""Attention over a sequence that several ranks share, its keys and values exchanged under compute."""

from __future__ import annotations

from torch import Tensor

from ds_hybrid.attention.choose import Schedule
from ds_hybrid.attention.masks import Sight
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.modes import WireDtype


class KVGatherAttention:
    """Softmax attention of this rank's queries over the keys and values of all ranks of ``group``.

    Args:
        group: the ranks that share the sequences; its meter counts what leaves.
        schedule: which exchanges, and how many are under way; :func:`ds_hybrid.attention.choose.choose` finds one. The
            same on all ranks.
        wire_dtype: how keys and values of others travel, in forward and again in backward. Gradients travel as they
            are.
    """

    def __init__(self, group: RankGroup, schedule: Schedule, *, wire_dtype: WireDtype = "auto") -> None:
        self.group = group
        self.schedule = schedule
        self.wire_dtype: WireDtype = wire_dtype

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sight: Sight,
        *,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """All ranks call it together, and their backwards too.

        Args:
            query: [B, H, shard_length, D], the rank's shard in the order of ``sight.shards``, RoPE applied.
            key: [B, KV, shard_length, D]; KV divides H, and each KV head serves H / KV heads of queries.
            value: [B, KV, shard_length, DV].
            sight: what this rank's queries see.
            scale: of the scores; None: D ** -0.5.

        Returns:
            [B, H, shard_length, DV], in the dtype of ``query``. Zeros for a query that sees nothing.

        Raises:
            ConfigError: dropout, or shapes and dtypes that do not fit.
        """
        raise NotImplementedError
