"""Optimizer parameter groups in which experts stand apart, as DeepSpeed's ZeRO needs them.

DeepSpeed 0.19.8 splits only unnamed parameter lists of optimizers that it builds itself. Here every client's groups are
split, whatever they are called, and learning rate schedulers follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor
from torch.optim import Optimizer

_ORIGIN = "group_before_split"
_PER_GROUP = (
    *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"),  # torch's
    *("min_lr", "delta_lrs", "org_lrs", "min_moms", "max_moms"),  # DeepSpeed's
)
"""What schedulers keep as a list with one entry for each group."""

ParameterGroup = dict[str, Any]


@dataclass(frozen=True)
class SplitGroups:
    """Groups of which each holds dense parameters or the experts of one expert-parallel group size.

    Attributes:
        groups: none of them empty.
        origins: for each of them the index of the group that it was cut from.
    """

    groups: list[ParameterGroup]
    origins: list[int]


def split_groups(parameters: Iterable[Tensor | Mapping[str, Any]], *, trainable_only: bool) -> SplitGroups:
    """Split what an optimizer takes: parameters, or parameter groups with or without a ``name``.

    A part keeps its group's options. Groups that are split already stay as they are.

    Args:
        trainable_only: leave out groups without a trainable parameter, which ZeRO cannot partition.
    """
    entries = list(parameters)
    if not all(isinstance(entry, Mapping) for entry in entries):
        entries = [{"params": entries}]
    taken: set[str] = set()
    named = []
    for index, entry in enumerate(entries):
        assert isinstance(entry, Mapping)
        params = [entry["params"]] if isinstance(entry["params"], Tensor) else list(entry["params"])
        name = _unused_name(entry.get("name") or f"group{index}", taken)
        named.append({**entry, "params": params, "name": name, _ORIGIN: index})
    split = [group for group in split_params_into_different_moe_groups_for_optimizer(named) if group["params"]]
    if trainable_only:
        split = [group for group in split if any(p.requires_grad for p in group["params"])]
    return SplitGroups(split, [group.pop(_ORIGIN) for group in split])


def split_optimizer(optimizer: Optimizer, scheduler: Any, *, trainable_only: bool) -> list[int]:
    """Split a client optimizer's groups in place; a scheduler that drives them keeps each part's learning rate.

    Args:
        scheduler: of torch or DeepSpeed, over ``optimizer``. Anything else is left alone: it is built later.

    Returns:
        For each group the index of the group that it was cut from.
    """
    split = split_groups(optimizer.param_groups, trainable_only=trainable_only)
    optimizer.param_groups[:] = split.groups
    if getattr(scheduler, "optimizer", None) is optimizer:
        follow_split(scheduler, split.origins)
    return split.origins


def follow_split(scheduler: Any, origins: Sequence[int]) -> None:
    """Give a scheduler over groups that were split the entries of each part."""
    for name in _PER_GROUP:
        values = vars(scheduler).get(name)
        if isinstance(values, list):
            setattr(scheduler, name, [values[origin] for origin in origins])
    for inner in getattr(scheduler, "_schedulers", ()):
        follow_split(inner, origins)


def _unused_name(name: str, taken: set[str]) -> str:
    candidate, suffix = name, 1
    while candidate in taken:
        candidate, suffix = f"{name}.{suffix}", suffix + 1
    taken.add(candidate)
    return candidate
