"""Which models of PEFT can be converted."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from ds_hybrid.engine.adapters import base_model, refuse_adapted_experts
from ds_hybrid.errors import ConfigError
from tests.multirank.models import make_model


def adapted(model_type: str, **options: Any) -> Any:
    return get_peft_model(make_model(model_type), LoraConfig(r=2, **options))  # type: ignore[arg-type]


def test_the_base_of_a_model() -> None:
    plain = make_model("mixtral")
    assert base_model(plain) is plain
    model = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj"]))  # type: ignore[arg-type]
    assert base_model(model) is plain


@pytest.mark.parametrize(
    ("model_type", "targets", "place"),
    [
        ("mixtral", ["w1", "w3"], "model.layers.0.mlp.experts"),
        ("mixtral", "all-linear", "model.layers.0.mlp.gate"),
        ("qwen3_moe", ["mlp.gate"], "model.layers.0.mlp.gate"),
    ],
)
def test_adapters_that_the_conversion_would_lose(model_type: str, targets: Any, place: str) -> None:
    parameters = {"target_modules": targets}
    if targets == ["mlp.gate"]:
        parameters = {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}
    model = adapted(model_type, **parameters)
    with pytest.raises(ConfigError, match=rf"^base_model\.model\.{place}: has an adapter \(PEFT; 2 such layers\)"):
        refuse_adapted_experts(model, converted="experts")
    refuse_adapted_experts(model, converted=None)  # every rank has all experts then


def test_a_whole_layer_in_modules_to_save() -> None:
    """PEFT copies it, and the copy's experts would be whole on every rank."""
    model = adapted("mixtral", target_modules=["q_proj"], modules_to_save=["layers.0"])
    message = r"^base_model\.model\.model\.layers\.0: has an adapter \(PEFT; 1 such layers\)"
    with pytest.raises(ConfigError, match=message):
        refuse_adapted_experts(model, converted="experts")


def test_experts_by_another_name() -> None:
    """As ``expert_parallel.expert_pattern`` names them."""
    model: Any = make_model("mixtral")
    for layer in model.model.layers:
        layer.mlp.specialists = layer.mlp.experts
        del layer.mlp.experts
    adapted_model = get_peft_model(model, LoraConfig(r=2, target_modules=["w1", "w3"]))
    with pytest.raises(ConfigError, match=r"^base_model\.model\.model\.layers\.0\.mlp\.specialists: has an adapter"):
        refuse_adapted_experts(adapted_model, converted="specialists")
    refuse_adapted_experts(adapted_model, converted="experts")


def test_adapters_elsewhere_are_fine() -> None:
    model = adapted("mixtral", target_modules=["q_proj", "o_proj", "lm_head"], modules_to_save=["embed_tokens", "norm"])
    refuse_adapted_experts(model, converted="experts")
