"""Attention over a sequence that several ranks share, its keys and values exchanged under compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hybrid.attention.blocks import FusedKernel, Kernel
from ds_hybrid.attention.choose import AttentionShape, Schedule
from ds_hybrid.attention.exchange import Exchanges, KVFormat
from ds_hybrid.attention.gathering import Gathering, blocks_backward, blocks_forward, whole_backward, whole_forward
from ds_hybrid.attention.masks import Sight
from ds_hybrid.attention.passes import BackwardPass, ForwardPass, KVBlock, PassRules
from ds_hybrid.attention.ring import Ring, ring_backward, ring_forward
from ds_hybrid.attention.traffic import KVShape
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.modes import WireDtype
from ds_hybrid.dispatch.spans import Spans
from ds_hybrid.errors import ConfigError

_SPAN = "attention_gather"
"""Exchanges with the compute that runs meanwhile, in a timeline."""


class KVGatherAttention:
    """Softmax attention of this rank's queries over the keys and values of all ranks of ``group``.

    Memory: a shard's queries, output and gradients; keys and values of all ranks only where the schedule says so (all
    of them for ``"whole"``, ``in_flight`` pieces and what is kept for ``"blocks"``, three shards, and three of
    gradients, for ``"ring"``); masks and scores of one tile.

    Args:
        group: the ranks that share the sequences; its meter counts what leaves.
        schedule: which exchanges, and how many are under way; or what finds one for a layer and its dtype, as
            :class:`ds_hybrid.attention.scheduler.Scheduler` does. The same on all ranks.
        wire_dtype: how keys and values of others travel, in forward and again in backward. Gradients travel as they
            are; ``"ring"`` rounds their sums to that dtype at every hop.
        kernel: computes the tiles.
    """

    def __init__(
        self,
        group: RankGroup,
        schedule: Schedule | Callable[[AttentionShape, torch.dtype], Schedule],
        *,
        wire_dtype: WireDtype = "auto",
        kernel: Kernel | None = None,
    ) -> None:
        self.group = group
        self._schedule = schedule
        self._wire_dtype: WireDtype = wire_dtype
        self._kernel = kernel or FusedKernel()
        self._exchanges: dict[torch.device, Exchanges] = {}

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
        """All ranks call it together, and their backwards too. Under autocast it computes in the dtype of that.

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
        query, key, value = _autocast(query, key, value)
        _check(query, key, value, sight, self.group, dropout)
        if query.device not in self._exchanges:
            self._exchanges[query.device] = Exchanges(self.group, query.device)
        kv = KVFormat(key.shape[0], key.shape[1], (key.shape[3], value.shape[3]), key.dtype, self._wire_dtype)
        call = _Call(
            self._schedule_for(query, kv, sight),
            self._exchanges[query.device],
            kv,
            PassRules(sight, self._kernel, query.shape[3] ** -0.5 if scale is None else scale),
            self.group.meter.watched_by,
        )
        with torch.autocast(query.device.type, enabled=False):  # products that are to be exact stay so
            return _KVGather.apply(query, key, value, call)

    def _schedule_for(self, query: Tensor, kv: KVFormat, sight: Sight) -> Schedule:
        if isinstance(self._schedule, Schedule):
            return self._schedule
        shape = KVShape(
            num_ranks=self.group.size,
            batch_size=kv.batch_size,
            shard_length=query.shape[2],
            num_kv_heads=kv.num_heads,
            head_dim=kv.dims[0],
            value_head_dim=kv.dims[1],
            value_bytes=kv.dtype.itemsize,
            wire_dtype=kv.wire_dtype,
        )
        layer = AttentionShape(shape, query.shape[1], sight.rule.causal, sight.rule.window)
        return self._schedule(layer, kv.dtype)


@dataclass(frozen=True)
class _Call:
    schedule: Schedule
    exchanges: Exchanges
    kv: KVFormat
    rules: PassRules
    spans: Spans

    def forward(self, own: KVBlock, run: ForwardPass) -> list[Tensor]:
        """Returns what backward needs of others' keys and values."""
        if self.schedule.variant == "ring":
            ring_forward(self._ring(), own, run)
            return []
        forward = whole_forward if self.schedule.variant == "whole" else blocks_forward
        return forward(self._gathering(), own, run)

    def backward(self, own: KVBlock, run: BackwardPass, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if self.schedule.variant == "ring":
            return ring_backward(self._ring(), own, run)
        backward = whole_backward if self.schedule.variant == "whole" else blocks_backward
        return backward(self._gathering(), own, run, kept)

    def own(self, key: Tensor, value: Tensor) -> KVBlock:
        sight = self.rules.sight
        return KVBlock(sight.shards.block(sight.rank), key, value)

    def _ring(self) -> Ring:
        return Ring(self.exchanges, self.rules.sight, self.kv)

    def _gathering(self) -> Gathering:
        return Gathering(self.schedule, self.exchanges, self.rules.sight, self.kv)


class _KVGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
        run = ForwardPass(call.rules, query, value.shape[3])
        with call.exchanges.group.meter.spans.work(_SPAN):
            kept = call.forward(call.own(key, value), run)
        output = run.merged.output.to(query.dtype)
        ctx.call = call
        ctx.save_for_backward(query, key, value, output, run.merged.lse_for_backward(), *kept)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, lse, *kept = ctx.saved_tensors
        run = BackwardPass(ctx.call.rules, query, output, lse, grad_output)
        ctx.call.exchanges.group.meter.watched_by = ctx.call.spans
        with ctx.call.spans.back(_SPAN), torch.autocast(query.device.type, enabled=False):
            grad_key, grad_value = ctx.call.backward(ctx.call.own(key, value), run, kept)
        return run.grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In the dtype in which torch's own attention would take them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device)) for x in tensors)


def _check(query: Tensor, key: Tensor, value: Tensor, sight: Sight, group: RankGroup, dropout: float) -> None:
    if dropout:
        raise ConfigError(
            f"attention dropout {dropout}: must be 0 where keys and values are gathered: a kernel draws its random "
            "numbers by places in its own tile, so it would drop other scores than one process does. Set "
            "attention_dropout to 0."
        )
    length = sight.shards.shard_length
    fits = (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[2] == key.shape[2] == value.shape[2] == length
        and query.shape[0] == key.shape[0] == value.shape[0]
        and key.shape[1] == value.shape[1]
        and query.shape[1] % key.shape[1] == 0
        and query.shape[3] == key.shape[3]
        and sight.num_rows in (1, query.shape[0])
        and query.dtype == key.dtype == value.dtype
    )
    if not fits:
        shapes = ", ".join(
            f"{name} {list(x.shape)} {x.dtype}" for name, x in (("query", query), ("key", key), ("value", value))
        )
        raise ConfigError(
            f"attention got {shapes}: must be query [B, H, {length}, D], key [B, KV, {length}, D] and value "
            f"[B, KV, {length}, DV] of one dtype, KV a divisor of H, B that of the documents ({sight.num_rows})."
        )
    if (sight.shards.num_ranks, sight.rank) != (group.size, group.rank):
        raise ConfigError(
            f"a sequence over {sight.shards.num_ranks} ranks, seen by rank {sight.rank}, in a group of {group.size} as "
            f"rank {group.rank}: both must be the same."
        )
