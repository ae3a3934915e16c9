"""Ways to compute attention over one long sequence that are compared, and what all of them compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from cases import Batch
from deepspeed.sequence.layer import DistributedAttention
from methods import Method
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ds_hybrid.attention.blocks import FusedKernel
from ds_hybrid.attention.choose import Schedule
from ds_hybrid.attention.exchange import KVFormat
from ds_hybrid.attention.kv_gather import KVGatherAttention
from ds_hybrid.attention.masks import MaskRule, Sight
from ds_hybrid.attention.passes import BackwardPass, ForwardPass, KVBlock, PassRules
from ds_hybrid.attention.shards import Order, Shards
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.meter import Meter

FULL = "full"
DESCRIPTIONS: dict[str, str] = {
    FULL: "torch's fused attention, the whole sequence on one rank, the others idle",
    "serial": "keys and values gathered before anything is computed, and kept; gradients reduced after all",
    "ulysses": "deepspeed.sequence.layer.DistributedAttention over torch's fused attention",
    "whole": "ds_hybrid: keys, then values under the scores",
    "blocks": "ds_hybrid: eight pieces, three of them on their way, gathered again in backward",
    "blocks_kept": "the same, all pieces kept for backward",
    "blocks_fp8": "blocks, keys and values in fp8 on the wire",
    "ring": "ds_hybrid: shards passed on",
}
SCHEDULES: dict[str, Schedule] = {
    "whole": Schedule("whole"),
    "blocks": Schedule("blocks"),
    "blocks_kept": Schedule("blocks", keep_bytes=2**40),
    "blocks_fp8": Schedule("blocks"),
    "ring": Schedule("ring"),
}
TOLERANCES: dict[str, float] = {"blocks_fp8": 0.1}


@dataclass(frozen=True)
class Case:
    """One sequence: its length, and the heads of the layer."""

    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool

    @property
    def width(self) -> int:
        """Of a token's queries, keys and values together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def whole(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """The same on every rank: [length, width], and the gradient of the output [length, num_heads * head_dim]."""
        generator = torch.Generator().manual_seed(self.length)
        packed = torch.randn(self.length, self.width, generator=generator)
        upstream = torch.randn(self.length, self.num_heads * self.head_dim, generator=generator)
        return Batch(packed, upstream).to(device, dtype)

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[R, width] -> query, key and value, [1, heads, R, head_dim] each."""
        heads = packed.unflatten(1, (-1, self.head_dim)).transpose(0, 1)[None]
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        return query, key, value

    def joined(self, output: Tensor) -> Tensor:
        """[1, num_heads, R, head_dim] -> [R, num_heads * head_dim]."""
        return output[0].transpose(0, 1).flatten(1)


@dataclass(frozen=True)
class Contender:
    """A method, what this rank gives to it, and which tokens those are."""

    method: Method
    batch: Batch
    index: Tensor


def build(name: str, case: Case, whole: Batch, group: RankGroup) -> Contender:
    """Collective. Raises ``ConfigError`` or what DeepSpeed raises where the sizes do not suit."""
    order: Order = "balanced" if case.causal and name != "ulysses" else "consecutive"
    shards = Shards(case.length, group.size, order)
    meter = None
    if name == FULL:
        index = torch.arange(case.length if group.rank == 0 else 0)
        forward = _full(case)
    else:
        index = torch.from_numpy(shards.index(group.rank))
        if name == "ulysses":
            forward = _ulysses(case, group)
        else:
            sight = Sight(shards, group.rank, MaskRule(case.causal))
            meter = group.meter
            forward = _serial(case, group, sight) if name == "serial" else _gathered(name, case, group, sight)
    batch = Batch(*(x[index.to(x.device)].contiguous() for x in (whole.tokens, whole.upstream)))
    return Contender(Method(name, forward, nn.Module(), meter), batch, index)


def lone_group() -> RankGroup:
    """All ranks."""
    return RankGroup(dist.get_world_group(), Meter())


def _full(case: Case) -> Callable[[Tensor], Tensor]:
    def forward(packed: Tensor) -> Tensor:
        if not len(packed):
            return packed[:, : case.num_heads * case.head_dim] * 1.0
        query, key, value = case.split(packed)
        return case.joined(scaled_dot_product_attention(query, key, value, is_causal=case.causal, enable_gqa=True))

    return forward


def _ulysses(case: Case, group: RankGroup) -> Callable[[Tensor], Tensor]:
    def local(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return scaled_dot_product_attention(query, key, value, is_causal=case.causal, enable_gqa=True).transpose(1, 2)

    attention = DistributedAttention(local, group.process_group, scatter_idx=2, gather_idx=1)

    def forward(packed: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2).contiguous() for x in case.split(packed))
        return attention(query, key, value, 0)[0].flatten(1)

    return forward


def _gathered(name: str, case: Case, group: RankGroup, sight: Sight) -> Callable[[Tensor], Tensor]:
    attention = KVGatherAttention(group, SCHEDULES[name], wire_dtype="fp8_e4m3" if name == "blocks_fp8" else "auto")
    return lambda packed: case.joined(attention(*case.split(packed), sight))


def _serial(case: Case, group: RankGroup, sight: Sight) -> Callable[[Tensor], Tensor]:
    rules = PassRules(sight, FusedKernel(), case.head_dim**-0.5)
    return lambda packed: case.joined(_Serial.apply(*case.split(packed), rules, group))


class _Serial(torch.autograd.Function):
    """Nothing is under way while anything is computed."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rules: PassRules, group: RankGroup) -> Tensor:
        kind = KVFormat(1, key.shape[1], (key.shape[3], value.shape[3]), key.dtype)
        wire = group.all_gather(kind.pack(key, value)).wait()
        run = ForwardPass(rules, query, value.shape[3])
        for block in _blocks(kind, wire, rules.sight):
            run.add(block)
        output = run.merged.output.to(query.dtype)
        ctx.rules, ctx.group, ctx.kind = rules, group, kind
        ctx.save_for_backward(query, output, run.merged.lse_for_backward(), wire)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, output, lse, wire = ctx.saved_tensors
        run = BackwardPass(ctx.rules, query, output, lse, grad_output)
        blocks = deque(_blocks(ctx.kind, wire, ctx.rules.sight))
        gradients = torch.cat([ctx.kind.join_gradients(*run.gradients(block)).to(query.dtype) for block in blocks])
        key, value = ctx.kind.split_gradients(ctx.group.reduce_scatter(gradients).wait())
        return run.grad_query.to(query.dtype), key, value, None, None


def _blocks(kind: KVFormat, wire: Tensor, sight: Sight) -> list[KVBlock]:
    parts = wire.chunk(sight.shards.num_ranks)
    return [KVBlock(sight.shards.block(rank), *kind.unpack(part)) for rank, part in enumerate(parts)]
