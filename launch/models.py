"""The models that train.py makes from scratch: tiny named ones over bytes, or any Hugging Face config.

A tiny model is its family's own architecture, small enough for a CPU: hidden size 256, 8 or more experts, top-2.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from ds_hybrid.errors import ConfigError

NUM_BYTES = 256
BALANCE = 0.01


def tiny_qwen3_moe() -> PretrainedConfig:
    """2 layers, 8 experts."""
    return Qwen3MoeConfig(
        vocab_size=NUM_BYTES,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=256,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=BALANCE,
        max_position_embeddings=4096,
    )


def tiny_mixtral() -> PretrainedConfig:
    """2 layers, 8 experts."""
    return MixtralConfig(
        vocab_size=NUM_BYTES,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        num_local_experts=8,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=BALANCE,
        max_position_embeddings=4096,
    )


def tiny_deepseek_v3() -> PretrainedConfig:
    """1 dense and 2 MoE layers, 16 experts in 4 groups and a shared one."""
    return DeepseekV3Config(
        vocab_size=NUM_BYTES,
        hidden_size=256,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=64,
        moe_intermediate_size=256,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        max_position_embeddings=4096,
    )


TINY_MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "tiny_qwen3_moe": tiny_qwen3_moe,
    "tiny_mixtral": tiny_mixtral,
    "tiny_deepseek_v3": tiny_deepseek_v3,
}


def model_config(model: str, seq_len: int) -> PretrainedConfig:
    """The config of a name in ``TINY_MODELS``, or of a Hugging Face config.json or the folder it lies in.

    Raises ``ConfigError`` for another name, a file transformers cannot read, or a model too small for bytes or for
    ``seq_len`` tokens.
    """
    config = TINY_MODELS[model]() if model in TINY_MODELS else _config_from_file(model)
    for size, rule, least in (
        ("vocab_size", "bytes take", NUM_BYTES),
        ("max_position_embeddings", "--seq-len takes", seq_len),
    ):
        value = getattr(config.get_text_config(), size, None)
        if value is not None and value < least:
            raise ConfigError(f"--model {model}: {size} = {value}, but {rule} {least}. Set {size} to {least} or more.")
    return config


def build_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A model with random float32 weights: the same on every rank, for they depend on ``config`` and ``seed`` alone."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _config_from_file(model: str) -> PretrainedConfig:
    if not Path(model).exists():
        raise ConfigError(
            f"--model {model}: neither a name nor a file. Give one of {', '.join(TINY_MODELS)}, or the path of a "
            "Hugging Face config.json."
        )
    try:
        return AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model {model}: transformers cannot read this config: {error}") from error
