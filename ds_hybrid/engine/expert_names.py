"""Names of experts' parameters: those of this rank's slots, and those of the whole model. Pure.

A converted layer has all experts of a rank in one tensor, ``<layer>.experts.w1`` [E/P, ...]. An explicit one has a
module for each slot, ``<layer>.deepspeed_moe.experts.deepspeed_experts.<slot>``; the whole model's has the logical
expert's number there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_hybrid.placement import ExpertPlacement

_NUMBER = re.compile(r"(?<=\bdeepspeed_moe\.experts\.deepspeed_experts\.)\d+")


@dataclass(frozen=True)
class ExpertLayer:
    """A MoE layer as far as its experts' names go.

    Attributes:
        stacked: whether it is a converted one.
        groups: its expert-parallel groups of ranks.
    """

    name: str
    placement: ExpertPlacement
    stacked: bool
    groups: Sequence[Sequence[int]] = ()

    @property
    def prefix(self) -> str:
        """Of the names of its experts' parameters."""
        inner = "experts." if self.stacked else "deepspeed_moe.experts.deepspeed_experts."
        return f"{self.name}.{inner}" if self.name else inner

    def ranks_at(self, place: int) -> list[int]:
        """The ranks that have this place in their expert-parallel group, and so the same experts."""
        return sorted(group[place] for group in self.groups)


def expert_layer_of(name: str, layers: Mapping[str, ExpertLayer]) -> ExpertLayer | None:
    """The layer of whose experts this is a parameter's name, if any."""
    return next((layer for layer in layers.values() if name.startswith(layer.prefix)), None)


def slot_name(name: str, number: int) -> str:
    """The name of an explicit layer's expert with another number in it."""
    return _NUMBER.sub(str(number), name, count=1)


def logical_name(name: str, expert_of_slot: Sequence[int]) -> str:
    """The whole model's name of a parameter of this rank.

    Args:
        expert_of_slot: [E/P] of this rank.
    """
    match = _NUMBER.search(name)
    return name if match is None else slot_name(name, int(expert_of_slot[int(match[0])]))
