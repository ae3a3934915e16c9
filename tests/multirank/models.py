"""Tiny random Hugging Face models of every AutoEP preset."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_DEEPSEEK: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_QWEN: dict[str, Any] = {**_COMMON, "head_dim": 8, "moe_intermediate_size": 24, "num_experts": 8}

CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**_COMMON, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {**_QWEN, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "qwen3_5_moe_text": {
        **_QWEN,
        "initializer_range": 0.05,  # larger, the linear attention's gradients explode and rounding errors with them
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.0},
    "deepseek_v3": {**_DEEPSEEK, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "minimax_m3_vl_text": {
        **_COMMON,
        "head_dim": 8,
        "rotary_dim": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 16,
        "mlp_layer_types": ["dense", "sparse"],
    },
}
"""One entry per preset, by Hugging Face model type."""


def make_model(model_type: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    """A causal LM whose weights depend on the arguments alone."""
    import transformers

    fields = {**CONFIGS.get(model_type, _COMMON), "use_cache": False, **changes}
    if model_type == "deepseek_v2" and transformers.__version__ == "5.8.0":
        # Its group-limited router reads an attribute that nobody sets.
        fields |= {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
    config = transformers.AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(seed)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model


def is_known(model_type: str) -> bool:
    """Whether the installed transformers has the model."""
    import transformers

    return model_type in transformers.CONFIG_MAPPING
