"""The small language model that benchmarks of whole training runs train, and how large it is."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import ds_hybrid
from ds_hybrid.cli.arguments import count

VOCABULARY = 256
"""As many as a byte has values."""
TOP_K = 2


@dataclass(frozen=True)
class Sizes:
    """Of a command line. ``batch``, sequences, is of each rank; ``ep`` None is the number of ranks."""

    ep: int | None
    experts: int
    layers: int
    hidden: int
    width: int
    batch: int
    seq_len: int


def add_sizes(parser: argparse.ArgumentParser, *, hidden: int) -> None:
    """The options of :class:`Sizes`; ``hidden`` is the default of that one."""
    add = parser.add_argument
    add("--ep", type=count, help="size of the expert-parallel groups (the number of ranks)")
    add("--experts", type=count, default=32, help="of a layer (%(default)s)")
    add("--layers", type=count, default=4, help="(%(default)s)")
    add("--hidden", type=count, default=hidden, help="size of a token (%(default)s)")
    add("--width", type=count, default=256, help="of an expert (%(default)s)")
    add("--batch", type=count, default=4, help="sequences of a rank (%(default)s)")
    add("--seq-len", type=count, default=128, help="tokens of a sequence (%(default)s)")


def build_engine(sizes: Sizes, ds_config: dict[str, Any], *, seed: int = 0, **model: Any) -> Any:
    """An engine whose weights depend on ``sizes``, ``seed`` and ``model`` alone.

    Args:
        ds_config: what there is beside batch and expert groups, which follow from ``sizes``.
        model: more fields of the model's configuration.
    """
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=max(sizes.hidden // 4, 8),
        moe_intermediate_size=sizes.width,
        num_experts=sizes.experts,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=sizes.seq_len,
        **model,
    )
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    document = {
        "train_micro_batch_size_per_gpu": sizes.batch,
        "expert_parallel": {"enabled": True, "autoep_size": sizes.ep or dist.get_world_size()},
        "steps_per_print": 10**9,
        **ds_config,
    }
    return ds_hybrid.initialize(model=module, model_parameters=module.parameters(), config=document)[0]
