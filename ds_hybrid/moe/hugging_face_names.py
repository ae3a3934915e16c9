"""AutoEP's names of a model's tensors, turned back into those of the Hugging Face model.

AutoEP replaces each MoE block: the experts become ``experts.w1``, ``w2`` and ``w3``, the router ``router.gate``, shared
experts ``shared_experts``. What the block looked like is read from the unconverted model, by AutoEP's own parser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import MoELayerSpec, parse_autoep_config
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout
from torch import Tensor, nn

from ds_hybrid.errors import CheckpointError


@dataclass(frozen=True)
class HuggingFaceBlock:
    """A MoE block as the Hugging Face model has it.

    Attributes:
        spec: what AutoEP's parser found: the block's path, and the names of its parts.
        transposed: the experts' weights are [E, in, out], not [E, out, in].
        suffix: after the names of an expert's weights; ".weight" where they are modules.
    """

    spec: MoELayerSpec
    transposed: bool = False
    suffix: str = ""


def hugging_face_blocks(model: nn.Module, expert_parallel: Mapping[str, Any]) -> tuple[HuggingFaceBlock, ...]:
    """The blocks that AutoEP converts.

    Args:
        model: unconverted; on the meta device or under zero.Init if you like.
        expert_parallel: that section of the ds_config.
    """
    specs = AutoEP(model, parse_autoep_config(dict(expert_parallel))).ep_parser()
    return tuple(_block(model, spec) for spec in specs)


def to_hugging_face(state: dict[str, Tensor], blocks: Sequence[HuggingFaceBlock]) -> dict[str, Tensor]:
    """The tensors of a whole AutoEP model under the Hugging Face model's names, as its modules have them.

    Args:
        state: experts as [E, ...] in logical order. It is emptied, so that a layer at most is there twice.

    Raises:
        CheckpointError: a block has only some of its expert weights.
    """
    renamed: dict[str, Tensor] = {}
    for block in blocks:
        renamed |= _rename_block(state, block)
    renamed |= state
    state.clear()
    return renamed


def _block(model: nn.Module, spec: MoELayerSpec) -> HuggingFaceBlock:
    experts: Any = getattr(model.get_submodule(spec.moe_module_name), spec.experts_name)
    if spec.expert_storage == "module_list":
        weight = getattr(experts[0], spec.expert_w1_name)
        return HuggingFaceBlock(spec, suffix=".weight" if isinstance(weight, nn.Module) else "")
    if spec.expert_w3_name is not None:
        return HuggingFaceBlock(spec)
    w1, w2 = getattr(experts, spec.expert_w1_name), getattr(experts, spec.expert_w2_name)
    # With zero.Init the experts are parted over the ranks, and have their shapes in ds_shape.
    layout = classify_fused_gate_up_layout(*(tuple(getattr(w, "ds_shape", w.shape)) for w in (w1, w2)))
    assert layout is not None  # else the parser had refused the block
    return HuggingFaceBlock(spec, transposed=layout.needs_transpose)


def _rename_block(state: dict[str, Tensor], block: HuggingFaceBlock) -> dict[str, Tensor]:
    spec = block.spec
    path = f"{spec.moe_module_name}."
    of_bias = "".join(f"{part}." for part in (spec.e_score_correction_bias_path,) if part)
    parts = {
        "router.e_score_correction_bias": f"{of_bias}e_score_correction_bias",
        "router.gate.": f"{spec.router_name}.",
        "shared_experts_gate.": f"{spec.shared_experts_gate_name}.",
        "shared_experts.": f"{spec.shared_experts_name}.",
    }
    # The router is there a second time, under the name that transformers' recorder looks for.
    alias = f"{spec.router_logits_capture_layer_name or spec.router_name}."
    experts = {w: state.pop(f"{path}experts.{w}", None) for w in ("w1", "w2", "w3")}
    renamed = _rename_experts({w: value for w, value in experts.items() if value is not None}, block)
    for name in [name for name in state if name.startswith(path)]:
        value, inner = state.pop(name), name.removeprefix(path)
        for ours, theirs in parts.items():
            if inner.startswith(ours):
                renamed[f"{path}{theirs}{inner.removeprefix(ours)}"] = value
                break
        else:
            if not inner.startswith(alias):
                renamed[name] = value
    return renamed


def _rename_experts(weights: dict[str, Tensor], block: HuggingFaceBlock) -> dict[str, Tensor]:
    """w1 and w3 [E, F, H], w2 [E, H, F] -> what the Hugging Face block has in their place."""
    spec = block.spec
    if not weights:  # left out, as frozen parameters may be
        return {}
    if len(weights) != 3:
        raise CheckpointError(f"{spec.moe_module_name}.experts: has {', '.join(weights)}, must have w1, w2 and w3.")
    named = {spec.expert_w2_name: weights.pop("w2")}
    if spec.expert_w3_name is None:
        named[spec.expert_w1_name] = torch.cat([weights.pop("w1"), weights.pop("w3")], dim=1)
    else:
        named |= {spec.expert_w1_name: weights.pop("w1"), spec.expert_w3_name: weights.pop("w3")}
    path = f"{spec.moe_module_name}.{spec.experts_name}"
    if spec.expert_storage == "fused_3d":
        return {f"{path}.{name}": value.mT.contiguous() if block.transposed else value for name, value in named.items()}
    return {
        f"{path}.{expert}.{name}{block.suffix}": value
        for name, values in named.items()
        for expert, value in enumerate(values.unbind())
    }
