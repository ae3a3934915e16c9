"""AutoEP's own repacking, undone: whatever a block looked like, it gets its tensors back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.moe.ep_repack import repack_expert_weights
from torch import Tensor, nn

from ds_hybrid.errors import CheckpointError
from ds_hybrid.moe.hugging_face_names import hugging_face_blocks, to_hugging_face
from tests.multirank.models import CONFIGS, is_known, make_model

EXPERTS, HIDDEN, WIDTH = 4, 8, 6
PATH = "model.layers.0.mlp"
CUSTOM = {
    "moe_layer_pattern": r"model\.layers\.\d+\.mlp",
    "num_experts_attr": "num_experts",
    "top_k_attr": "top_k",
    "expert_activation": "swiglu",
}


class Fused(nn.Module):
    """Experts in 3-D parameters."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


class Lone(nn.Module):
    """One expert of linear layers."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, (out, inp) in shapes.items():
            setattr(self, name, nn.Linear(inp, out, bias=False))


def make(experts: nn.Module) -> nn.Module:
    """A model with one MoE block, by the names that Hugging Face's have."""
    block, layer, inner, model = nn.Module(), nn.Module(), nn.Module(), nn.Module()
    block.gate, block.experts = nn.Linear(HIDDEN, EXPERTS, bias=False), experts
    layer.mlp = block
    inner.layers = nn.ModuleList([layer])
    inner.norm = nn.LayerNorm(HIDDEN)
    model.model = inner
    model.config = SimpleNamespace(num_experts=EXPERTS, top_k=2)  # type: ignore[assignment]
    return model


UP, DOWN = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "fused": (lambda: Fused({"gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN), "down_proj": (EXPERTS, *DOWN)}), {}),
    "transposed": (lambda: Fused({"gate_up_proj": (EXPERTS, HIDDEN, 2 * WIDTH), "down_proj": (EXPERTS, *UP)}), {}),
    "three": (
        lambda: Fused({"a": (EXPERTS, *UP), "b": (EXPERTS, *DOWN), "c": (EXPERTS, *UP)}),
        {"expert_w1": "a", "expert_w2": "b", "expert_w3": "c"},
    ),
    "modules": (
        lambda: nn.ModuleList([Lone({"w1": UP, "w2": DOWN, "w3": UP}) for _ in range(EXPERTS)]),
        {"expert_w1": "w1", "expert_w2": "w2", "expert_w3": "w3"},
    ),
    "fused modules": (
        lambda: nn.ModuleList([Lone({"w13": (2 * WIDTH, HIDDEN), "w2": DOWN}) for _ in range(EXPERTS)]),
        {"expert_w1": "w13", "expert_w2": "w2", "expert_w3": None},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_experts_in_every_layout(case: str) -> None:
    build, names = CASES[case]
    model = make(build())
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    blocks = hugging_face_blocks(model, {**CUSTOM, **names, "enabled": True})
    (block,) = blocks
    w1, w2, w3 = repack_expert_weights(model.get_submodule(f"{PATH}.experts"), block.spec, ep_rank=0, ep_size=1)
    assert w1.shape == w3.shape == (EXPERTS, WIDTH, HIDDEN)
    state = {name: value for name, value in expected.items() if "norm" in name}
    state |= {f"{PATH}.experts.w1": w1, f"{PATH}.experts.w2": w2, f"{PATH}.experts.w3": w3}
    state[f"{PATH}.router.gate.weight"] = expected[f"{PATH}.gate.weight"]
    state[f"{PATH}.gate.gate.weight"] = torch.zeros(1)  # the router's other name
    renamed = to_hugging_face(state, blocks)
    assert not state
    assert renamed.keys() == expected.keys()
    assert all(torch.equal(renamed[name], expected[name]) for name in expected)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_presets_are_read_from_a_model_without_values(model_type: str) -> None:
    if not is_known(model_type):
        pytest.skip("not in this transformers")
    with torch.device("meta"):
        model = make_model(model_type)
    blocks = hugging_face_blocks(model, {"enabled": True, "autoep_size": 2})
    layers = {name for name, module in model.named_modules() if hasattr(module, "experts")}
    assert {block.spec.moe_module_name for block in blocks} == layers
    assert layers
    parts = {name.split(".")[-1] for name, _ in model.named_modules()}
    shared = {block.spec.shared_experts_name for block in blocks if block.spec.has_shared_experts}
    assert shared == parts & {"shared_expert", "shared_experts"}


def test_parts_of_a_block_and_half_a_block() -> None:
    model = make(CASES["fused"][0]())
    blocks = hugging_face_blocks(model, {**CUSTOM, "enabled": True})

    def whole() -> dict[str, Tensor]:
        return {f"{PATH}.experts.{name}": torch.zeros(EXPERTS, 2, 2) for name in ("w1", "w2", "w3")}

    left_out = to_hugging_face({"model.norm.weight": torch.ones(2)}, blocks)  # as frozen parameters may be
    assert left_out.keys() == {"model.norm.weight"}
    half = whole()
    del half[f"{PATH}.experts.w3"]
    with pytest.raises(CheckpointError, match=f"{PATH}.experts: has w1, w2, must have w1, w2 and w3"):
        to_hugging_face(half, blocks)
