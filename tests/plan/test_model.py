"""Parameters by arithmetic against the published totals, and against models that transformers builds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ds_hybrid.errors import ConfigError
from ds_hybrid.plan.model import GroupedAttention, LatentAttention, ModelShape
from ds_hybrid.plan.model_file import model_from_config, read_model, read_published
from ds_hybrid.plan.tables import read_table, table_names

MODELS = table_names("models")


def shape_of(**changes: object) -> ModelShape:
    config = read_table("models", "tiny_qwen3_moe")[0]["config"] | changes
    return model_from_config(config, label="tiny", file="config.json")


@pytest.mark.parametrize("name", [name for name in MODELS if read_published(name)])
def test_parameters_agree_with_the_published_ones(name: str) -> None:
    published, shape = read_published(name), read_model(name)
    assert published is not None
    assert published.source
    assert shape.num_parameters == pytest.approx(published.total, rel=0.005)
    left_out = published.embeddings_left_out * shape.vocab_size * shape.hidden_size
    # Published to two digits.
    assert shape.num_active_parameters - left_out == pytest.approx(published.active, rel=0.025)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model_that_transformers_builds(name: str) -> None:
    """Built without memory; every parameter is counted, the experts by their name."""
    transformers = pytest.importorskip("transformers")
    import torch

    config = dict(read_table("models", name)[0]["config"])
    # Every layer of a kind is alike: a few of them show all kinds, and build in a moment.
    num_dense = config.get("first_k_dense_replace", 0)
    config |= {"num_hidden_layers": 3, "first_k_dense_replace": min(num_dense, 1)}
    shape = model_from_config(config, label=name, file=name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    counts = {key: parameter.numel() for key, parameter in model.named_parameters()}
    experts = sum(count for key, count in counts.items() if ".experts." in key)
    assert experts == shape.num_expert_parameters
    assert sum(counts.values()) == shape.num_parameters


@pytest.mark.parametrize("name", MODELS)
def test_a_config_that_transformers_has_saved_is_read(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model(**read_table("models", name)[0]["config"]).save_pretrained(tmp_path)
    assert replace(read_model(str(tmp_path)), name=name) == read_model(name)


def test_the_tables_name_their_sources() -> None:
    for name in MODELS:
        assert read_table("models", name)[0]["source"]


def test_the_quickstarts_table_is_the_quickstarts_model() -> None:
    models = pytest.importorskip("models")
    config = models.tiny_qwen3_moe()
    for key, value in read_table("models", "tiny_qwen3_moe")[0]["config"].items():
        assert getattr(config, key) == value, key


def test_flops_of_a_token_by_hand() -> None:
    """A matrix of n elements takes 2 n; attention 2 S (d_qk + d_v) a head and layer, half of it when causal."""
    shape = ModelShape(
        name="by hand",
        model_type="qwen3_moe",
        vocab_size=10,
        hidden_size=4,
        num_layers=3,
        num_dense_layers=1,
        attention=GroupedAttention(num_heads=2, num_kv_heads=1, head_dim=2),
        dense_width=5,
        expert_width=3,
        num_experts=6,
        top_k=2,
    )
    assert shape.projection_flops == 2 * 3 * (4 * 4 + 2 * 4 * 2 + 4 * 4)
    assert shape.whole_flops == 2 * (10 * 4 + 3 * 4 * 5 + 2 * 4 * 6)
    assert shape.expert_flops == 2 * 2 * 2 * 3 * 4 * 3
    assert shape.score_flops(7, causal=False) == 3 * 2 * 2 * 7 * (2 + 2)
    assert shape.score_flops(7, causal=True) == 3 * 2 * 7 * (2 + 2)


def test_active_parameters_leave_out_the_other_experts() -> None:
    shape = shape_of()
    assert shape.num_parameters - shape.num_active_parameters == 2 * (8 - 2) * 3 * 256 * 256


def test_latent_attention_without_a_latent_query() -> None:
    attention = LatentAttention(2, None, kv_rank=3, plain_dim=4, rotary_dim=1, value_dim=2)
    assert attention.num_sharded(8) == 2 * (8 * 5 + 3 * (4 + 2) + 2 * 8)
    assert attention.num_whole_matrices(8) == 8 * (3 + 1)


def test_routing_that_is_limited_to_groups() -> None:
    assert read_model("deepseek_v3").routing_groups == (4, 8)
    assert read_model("deepseek_v2_lite").routing_groups is None
    config = read_table("models", "deepseek_v3")[0]["config"]
    assert model_from_config(config | {"topk_group": 8}, label="all", file="x").routing_groups is None
    with pytest.raises(ConfigError, match=r"n_group = 0 \(x\): must be an integer >= 1"):
        model_from_config(config | {"n_group": 0}, label="none", file="x")


def test_plain_layers_of_qwen_are_counted() -> None:
    assert shape_of(num_hidden_layers=4, decoder_sparse_step=2, intermediate_size=512).num_dense_layers == 2
    assert shape_of(mlp_only_layers=[0], intermediate_size=512).num_moe_layers == 1


def test_all_problems_of_a_config_come_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        shape_of(hidden_size=0, moe_intermediate_size="8")
    assert raised.value.problems == (
        "hidden_size = 0 (config.json): must be an integer >= 1.",
        'moe_intermediate_size = "8" (config.json): must be an integer >= 1.',
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtrall"}, 'model_type = "mixtrall" (config.json): the planner knows mixtral, qwen3_moe'),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 (config.json): must be at most the number of experts, 8"),
    ],
)
def test_wrong_configs(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        shape_of(**changes)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0 (x): must be an integer >= 1."),
        ({"decoder_sparse_step": 4, "num_hidden_layers": 2}, "decoder_sparse_step = 4 (x): leaves no MoE layer of 2"),
        ({"mlp_only_layers": "all"}, 'mlp_only_layers = "all" (x): must be a list of integers from 0 to 47, or null.'),
        ({"mlp_only_layers": [48]}, "mlp_only_layers = [48] (x): must be a list of integers from 0 to 47, or null."),
        ({"tie_word_embeddings": "x"}, 'tie_word_embeddings = "x" (x): must be true, false or null.'),
        ({"attention_bias": 1}, "attention_bias = 1 (x): must be true, false or null."),
        ({"head_dim": "a"}, 'head_dim = "a" (x): must be an integer >= 1.'),
        ({"max_position_embeddings": "x"}, 'max_position_embeddings = "x" (x): must be an integer >= 1.'),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 (x): must divide num_attention_heads 32."),
    ],
)
def test_what_the_planner_cannot_weigh_is_refused(changes: dict[str, object], message: str) -> None:
    config = read_table("models", "qwen3_30b_a3b")[0]["config"]
    with pytest.raises(ConfigError, match=re.escape(message)):
        model_from_config(config | {"intermediate_size": 512} | changes, label="x", file="x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_k_dense_replace": 61}, "first_k_dense_replace = 61 (x): leaves no MoE layer of 61 layers"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace = -1 (x): must be an integer >= 0 or null."),
        ({"q_lora_rank": "big"}, 'q_lora_rank = "big" (x): must be an integer >= 1.'),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 (x): the planner knows 1 alone."),
    ],
)
def test_latent_models_that_the_planner_cannot_weigh(changes: dict[str, object], message: str) -> None:
    config = read_table("models", "deepseek_v3")[0]["config"]
    with pytest.raises(ConfigError, match=re.escape(message)):
        model_from_config(config | changes, label="x", file="x")


def test_null_takes_the_default() -> None:
    config = read_table("models", "deepseek_v3")[0]["config"]
    assert model_from_config(config | {"first_k_dense_replace": None}, label="x", file="x").num_dense_layers == 0


def test_a_table_whose_config_is_no_mapping(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text("config: [1]\n")
    with pytest.raises(ConfigError, match="must hold the keys of a Hugging Face"):
        read_model(str(file))


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"qwen3_30b: neither a file nor one of the models .* Did you mean"):
        read_model("qwen3_30b")
