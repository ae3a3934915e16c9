"""What the ranks of these tests build: engines of one MoE layer, with expert groups of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups
from torch import Tensor, nn

import ds_hybrid

_TABLES = (
    deepspeed_groups._EXPERT_PARALLEL_GROUP,
    deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS,
    deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP,
    deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
)


@dataclass(frozen=True)
class Sizes:
    """Of the layer, and of each rank's batch."""

    num_tokens: int
    hidden_size: int
    num_experts: int
    top_k: int


class OneLayer(nn.Module):
    def __init__(self, sizes: Sizes, ep_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moe = ds_hybrid.MoE(
            sizes.hidden_size,
            lambda: nn.Linear(sizes.hidden_size, sizes.hidden_size, bias=False),
            sizes.num_experts,
            ep_size=ep_size,
            k=sizes.top_k,
            seed=1,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.moe(tokens)[0]
        return output


@dataclass(frozen=True)
class Trained:
    """An engine, and DeepSpeed's tables of its expert groups. A process has one set of tables, for all its engines."""

    engine: Any
    tables: tuple[dict[str, Any], ...]

    @property
    def moe(self) -> Any:
        return self.engine.module.moe

    @property
    def expert_groups(self) -> list[list[int]]:
        """Of all ranks. Collective."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, dist.get_process_group_ranks(self.moe.dispatcher.group.process_group))
        return [list(ranks) for ranks in sorted({tuple(ranks) for ranks in found})]

    def take_engine(self) -> Any:
        """The engine; from now on DeepSpeed finds its groups."""
        _fill_tables(self.tables)
        return self.engine


def build(sizes: Sizes, *, ep_size: int, accumulation: int = 1, **section: Mapping[str, Any]) -> Trained:
    """``section`` is the ds_config's ``ds_hybrid``."""
    _fill_tables([{} for _ in _TABLES])
    model = OneLayer(sizes, ep_size)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "steps_per_print": 1000000,
        "ds_hybrid": section,
    }
    engine, *_ = ds_hybrid.initialize(model=model, model_parameters=model.parameters(), config=config)
    return Trained(engine, tuple(dict(table) for table in _TABLES))


def tokens_of_this_rank(sizes: Sizes) -> Tensor:
    """[T, H]; gradients flow back to them, as they would to a layer before."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(sizes.num_tokens, sizes.hidden_size, generator=generator).requires_grad_()


def join() -> None:
    """Start torch.distributed under whatever launcher there is."""
    deepspeed.init_distributed("gloo")


def _fill_tables(contents: Sequence[dict[str, Any]]) -> None:
    for table, entries in zip(_TABLES, contents, strict=True):
        table.clear()
        table.update(entries)
