"""Models with adapters of PEFT, such as LoRA: what lies below them, and where adapters cannot be.

PEFT is not imported: its model and its layers are told by what they have.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_hybrid.errors import ConfigError
from ds_hybrid.moe.layer import MoE


def base_model(model: nn.Module) -> nn.Module:
    """The model that PEFT wrapped, with the adapters in it; any other model itself."""
    is_wrapped = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    wrapped: Any = model
    return wrapped.get_base_model() if is_wrapped else model


def refuse_adapted_experts(model: nn.Module, *, converted: str | None) -> None:
    """Refuse adapters in MoE blocks.

    Args:
        converted: what blocks call the experts that AutoEP takes apart, leaving their adapters and the router's
            behind. None: AutoEP is off, and only explicit layers count, whose experts are on other ranks.

    Raises:
        ConfigError: the first such module of each layer.
    """
    adapted = [name for name, part in model.named_modules() if hasattr(part, "adapter_layer_names")]
    problems: dict[str, None] = {}
    for name, block in model.named_modules():
        if isinstance(block, MoE) or (converted and isinstance(getattr(block, converted, None), nn.Module)):
            # A whole part above the block too, such as a decoder layer in modules_to_save.
            found = next((place for place in adapted if _is_in(place, name) or _is_in(name, place)), None)
            if found is not None:
                problems[found] = None
    if problems:
        raise ConfigError(
            f"{next(iter(problems))}: has an adapter (PEFT; {len(problems)} such layers). Experts are shared out over "
            "ranks, and adapters on them or their router are not. Adapt attention alone: LoraConfig(target_modules="
            '["q_proj", "k_proj", "v_proj", "o_proj"]); "all-linear" takes the experts too.'
        )


def _is_in(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")
