"""Models with adapters of PEFT, such as LoRA: what lies below them, and where adapters cannot be.

PEFT is not imported: its model and its layers are told by what they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ds_hybrid.errors import ConfigError
from ds_hybrid.moe.layer import MoE


def base_model(model: nn.Module) -> nn.Module:
    """The model that PEFT wrapped, with the adapters in it; any other model itself."""
    wrapped: Any = model
    return wrapped.get_base_model() if has_adapters(model) and hasattr(model, "get_base_model") else model


def has_adapters(model: nn.Module) -> bool:
    """Whether the model is PEFT's, or transformers has put adapters into it."""
    return bool(getattr(model, "peft_config", None))


def refuse_adapted_experts(model: nn.Module, *, converted: str | None) -> None:
    """Refuse adapters in MoE blocks.

    Args:
        converted: what blocks call the experts that AutoEP takes apart, leaving their adapters and the router's
            behind. None: AutoEP is off, and only explicit layers count, whose experts are on other ranks.

    Raises:
        ConfigError: the first such module of each layer.
    """
    problems = []
    for name, block in model.named_modules():
        if isinstance(block, MoE) or (converted and isinstance(getattr(block, converted, None), nn.Module)):
            adapted = next(_adapted_parts(block), None)
            if adapted is not None:
                problems.append(f"{name}.{adapted}".rstrip("."))
    if problems:
        raise ConfigError(
            f"{problems[0]}: has an adapter (PEFT; {len(problems)} such layers). Experts are shared out over ranks, "
            "and adapters on them or their router are not. Adapt attention alone: LoraConfig(target_modules="
            '["q_proj", "k_proj", "v_proj", "o_proj"]); "all-linear" takes the experts too.'
        )


def _adapted_parts(block: nn.Module) -> Iterator[str]:
    for name, part in block.named_modules():
        if hasattr(part, "adapter_layer_names"):
            yield name
