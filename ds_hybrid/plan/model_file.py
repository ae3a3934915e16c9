"""A model's shape from a table of ds_configs/models, or from the config.json of a Hugging Face model. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_hybrid.errors import ConfigError
from ds_hybrid.plan.model import GroupedAttention, LatentAttention, ModelShape
from ds_hybrid.plan.tables import read_table
from ds_hybrid.problems import ABSENT, Problem, did_you_mean

_LATENT = ("deepseek_v2", "deepseek_v3")
MODEL_TYPES = ("mixtral", "qwen3_moe", *_LATENT)
"""The architectures that the planner knows, by Hugging Face's names."""


@dataclass(frozen=True)
class Published:
    """Parameters as the model's makers give them, and where they do.

    Attributes:
        embeddings_left_out: how many matrices of vocabulary x hidden size ``active`` leaves out.
    """

    total: float
    active: float
    source: str
    embeddings_left_out: int = 0


def read_model(name: str) -> ModelShape:
    """The shape of a model: the name of a table, or the path of a config.json or of the folder that it is in.

    Raises:
        ConfigError: there is no such model, or one line for each key that is missing or wrong.
    """
    table, file = read_table("models", name)
    config = table.get("config", table)
    if not isinstance(config, Mapping):
        raise ConfigError(Problem("config", "must hold the keys of a Hugging Face config.json.", config).line(file))
    label = name if file != name and not Path(name).exists() else str(config.get("_name_or_path") or Path(name).stem)
    return model_from_config(config, label=label, file=file)


def read_published(name: str) -> Published | None:
    """What the table ``name`` says of the model's parameters; None when nobody has published them."""
    table, _ = read_table("models", name)
    return Published(**table["published"]) if table.get("published") else None


def model_from_config(config: Mapping[str, Any], *, label: str, file: str) -> ModelShape:
    """The shape that a Hugging Face config describes; ``file`` is how messages call it. Errors as in ``read_model``."""
    model_type = config.get("model_type", ABSENT)
    if model_type not in MODEL_TYPES:
        hint = did_you_mean(str(model_type), MODEL_TYPES)
        rule = f"the planner knows {', '.join(MODEL_TYPES)}.{hint}"
        raise ConfigError(Problem("model_type", rule, model_type).line(file))
    keys = _Keys(config)
    keys.switch("attention_bias")  # biases are some ten-thousandths of the parameters, and left out
    shape = _latent_model(keys, config, label) if model_type in _LATENT else _grouped_model(keys, config, label)
    if keys.problems:
        raise ConfigError(*(problem.line(file) for problem in keys.problems))
    problems = list(_contradictions(shape, config))
    if problems:
        raise ConfigError(*(problem.line(file) for problem in problems))
    return shape


def _contradictions(shape: ModelShape, config: Mapping[str, Any]) -> Iterator[Problem]:
    if shape.top_k > shape.num_experts:
        rule = f"must be at most the number of experts, {shape.num_experts}."
        yield Problem("num_experts_per_tok", rule, shape.top_k)
    attention = shape.attention
    if attention.num_heads % attention.num_kv_heads:
        rule = f"must divide num_attention_heads {attention.num_heads}."
        yield Problem("num_key_value_heads", rule, attention.num_kv_heads)
    if config.get("moe_layer_freq", 1) != 1:
        yield Problem("moe_layer_freq", "the planner knows 1 alone.", config["moe_layer_freq"])
    if shape.num_dense_layers >= shape.num_layers:
        key = "first_k_dense_replace" if isinstance(attention, LatentAttention) else "decoder_sparse_step"
        rule = f"leaves no MoE layer of {shape.num_layers} layers (mlp_only_layers counts too)."
        yield Problem(key, rule, config.get(key, ABSENT))


class _Keys:
    """Reads a config's keys and gathers what is wrong with them, so that all problems come at once."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.problems: list[Problem] = []

    def __call__(self, key: str) -> int:
        value = self._config.get(key, ABSENT)
        if type(value) is int and value >= 1:
            return value
        self.problems.append(Problem(key, "must be an integer >= 1.", value))
        return 1

    def optional(self, key: str) -> int | None:
        """None where the key is absent or null."""
        return None if self._config.get(key) is None else self(key)

    def or_none(self, key: str) -> int:
        """From 0 on; 0 where the key is absent or null."""
        value = self._config.get(key)
        if value is None or (type(value) is int and value >= 0):
            return value or 0
        self.problems.append(Problem(key, "must be an integer >= 0 or null.", value))
        return 0

    def switch(self, key: str) -> bool:
        """False where the key is absent or null."""
        value = self._config.get(key)
        if value is not None and not isinstance(value, bool):
            self.problems.append(Problem(key, "must be true, false or null.", value))
        return value is True

    def layers(self, key: str, num_layers: int) -> set[int]:
        """A list of layers, counted from 0; empty where the key is absent or null."""
        value = self._config.get(key)
        is_list = value is None or isinstance(value, list)
        if is_list and all(type(layer) is int and 0 <= layer < num_layers for layer in value or []):
            return set(value or [])
        self.problems.append(Problem(key, f"must be a list of integers from 0 to {num_layers - 1}, or null.", value))
        return set()


def _grouped_model(keys: _Keys, config: Mapping[str, Any], label: str) -> ModelShape:
    is_mixtral = config["model_type"] == "mixtral"
    hidden_size, num_heads, num_layers = keys("hidden_size"), keys("num_attention_heads"), keys("num_hidden_layers")
    # Newer transformers write Qwen's number under Mixtral's name.
    names_as_qwen = not is_mixtral and config.get("num_experts") is not None
    step = 1 if is_mixtral else keys.optional("decoder_sparse_step") or 1
    named = set() if is_mixtral else keys.layers("mlp_only_layers", num_layers)
    dense_layers = {layer for layer in range(num_layers) if layer in named or (layer + 1) % step}
    return ModelShape(
        name=label,
        model_type=config["model_type"],
        vocab_size=keys("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_dense_layers=len(dense_layers),
        attention=GroupedAttention(
            num_heads,
            keys("num_key_value_heads"),
            keys.optional("head_dim") or hidden_size // num_heads,
            has_head_norms=not is_mixtral,
        ),
        dense_width=keys("intermediate_size") if dense_layers else 0,
        expert_width=keys("intermediate_size" if is_mixtral else "moe_intermediate_size"),
        num_experts=keys("num_experts" if names_as_qwen else "num_local_experts"),
        top_k=keys("num_experts_per_tok"),
        is_tied=keys.switch("tie_word_embeddings"),
        max_positions=keys.optional("max_position_embeddings"),
    )


def _latent_model(keys: _Keys, config: Mapping[str, Any], label: str) -> ModelShape:
    num_dense = keys.or_none("first_k_dense_replace")
    return ModelShape(
        name=label,
        model_type=config["model_type"],
        vocab_size=keys("vocab_size"),
        hidden_size=keys("hidden_size"),
        num_layers=keys("num_hidden_layers"),
        num_dense_layers=num_dense,
        attention=LatentAttention(
            num_heads=keys("num_attention_heads"),
            q_rank=keys.optional("q_lora_rank"),
            kv_rank=keys("kv_lora_rank"),
            plain_dim=keys("qk_nope_head_dim"),
            rotary_dim=keys("qk_rope_head_dim"),
            value_dim=keys("v_head_dim"),
        ),
        dense_width=keys("intermediate_size") if num_dense else 0,
        expert_width=keys("moe_intermediate_size"),
        num_experts=keys("n_routed_experts"),
        top_k=keys("num_experts_per_tok"),
        shared_width=keys.or_none("n_shared_experts") * keys("moe_intermediate_size"),
        is_tied=keys.switch("tie_word_embeddings"),
        max_positions=keys.optional("max_position_embeddings"),
        routing_groups=_routing_groups(keys, config),
    )


def _routing_groups(keys: _Keys, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """DeepSeek's ``topk_group`` of ``n_group``, where that limits anything."""
    if config.get("n_group") is None or config.get("topk_group") is None:
        return None
    chosen, of_all = keys("topk_group"), keys("n_group")
    return (chosen, of_all) if chosen < of_all else None
