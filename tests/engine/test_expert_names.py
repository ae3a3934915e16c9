"""Names of experts' parameters, of a slot and of the whole model."""

from __future__ import annotations

import pytest

from ds_hybrid.engine.expert_names import ExpertLayer, expert_layer_of, logical_name, slot_name
from ds_hybrid.placement import ExpertPlacement

PLACEMENT = ExpertPlacement.from_slots([[3, 0], [1, 2]])
LAYERS = {
    "layers.1.mlp": ExpertLayer("layers.1.mlp", PLACEMENT, stacked=True, groups=[[0, 3], [1, 2]]),
    "layers.11.moe": ExpertLayer("layers.11.moe", PLACEMENT, stacked=False, groups=[[0, 1]]),
}
EXPERT = "layers.11.moe.deepspeed_moe.experts.deepspeed_experts"


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("layers.1.mlp.experts.w1", "layers.1.mlp"),
        ("layers.1.mlp.shared_experts.up_proj.weight", None),
        ("layers.1.mlp.router.gate.weight", None),
        ("layers.11.mlp.experts.w1", None),
        (f"{EXPERT}.1.0.weight", "layers.11.moe"),
        ("layers.11.moe.deepspeed_moe.gate.wg.weight", None),
    ],
)
def test_whose_expert_a_parameter_belongs_to(name: str, layer: str | None) -> None:
    found = expert_layer_of(name, LAYERS)
    assert (found and found.name) == layer


def test_only_the_experts_number_changes() -> None:
    assert logical_name(f"{EXPERT}.1.7.weight", [3, 0]) == f"{EXPERT}.0.7.weight"
    assert slot_name(f"{EXPERT}.12.0.weight", 4) == f"{EXPERT}.4.0.weight"
    assert logical_name("layers.1.mlp.experts.w1", [3, 0]) == "layers.1.mlp.experts.w1"


def test_a_layer_that_is_the_whole_model_has_no_prefix() -> None:
    layer = ExpertLayer("", PLACEMENT, stacked=False)
    assert expert_layer_of("deepspeed_moe.experts.deepspeed_experts.0.weight", {"": layer}) is layer
    assert logical_name("deepspeed_moe.experts.deepspeed_experts.0.weight", [3, 0]).endswith(
        "deepspeed_experts.3.weight"
    )


def test_the_ranks_with_the_same_experts() -> None:
    assert [LAYERS["layers.1.mlp"].ranks_at(place) for place in range(2)] == [[0, 1], [2, 3]]
