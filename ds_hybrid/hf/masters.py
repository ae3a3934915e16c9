"""The fp32 masters of a checkpoint: ZeRO's shards joined to whole tensors, by name and place of the expert's rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_hybrid.engine.checkpoint import load_lazily
from ds_hybrid.engine.partitions import paddings_of_groups, runs_of_partition
from ds_hybrid.errors import CheckpointError
from ds_hybrid.hf.files import CheckpointFiles

GroupsOf = Callable[[str], Sequence[Sequence[int]]]
"""All expert-parallel groups, by a name such as "ep_size_4"."""


@dataclass(frozen=True)
class Fragment:
    """A run of a flattened parameter, on one rank.

    Attributes:
        name: the parameter's on that rank.
        place: an expert's: the rank's in its expert-parallel group; else the rank's in its tensor-parallel group.
        ep_size: of the expert-parallel group; 0 for what is not an expert's.
        values: [numel]. The fragments of a parameter follow each other by rank.
    """

    name: str
    place: int
    ep_size: int
    values: Tensor


@dataclass(frozen=True)
class Masters:
    """Masters by (name, place); joined when asked for.

    Attributes:
        parts: of each, in order.
        ep_sizes: of the expert-parallel groups of experts, by name.
    """

    parts: Mapping[tuple[str, int], Sequence[Tensor]] = field(default_factory=dict)
    ep_sizes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, fragments: Iterator[Fragment]) -> Masters:
        """Fragments of each parameter come in the order of their ranks."""
        parts: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        ep_sizes = {}
        for fragment in fragments:
            parts[fragment.name, fragment.place].append(fragment.values)
            if fragment.ep_size:
                ep_sizes[fragment.name] = fragment.ep_size
        return cls(parts, ep_sizes)

    def get(self, name: str, shape: Sequence[int], place: int = 0) -> Tensor | None:
        """The whole master, or None where the checkpoint has none.

        Raises:
            CheckpointError: its parts are not as long as its shape asks.
        """
        parts = self.parts.get((name, place))
        if parts is None:
            return None
        values, numel = torch.cat([part.detach() for part in parts]), math.prod(shape)
        if values.numel() < numel:
            raise CheckpointError(
                f"{name}: its {len(parts)} parts have {values.numel()} values, must have {numel}. Some files of the "
                "checkpoint are of another run."
            )
        return values[:numel].view(*shape)


def masters_of_stages_1_and_2(files: CheckpointFiles, groups_of: GroupsOf) -> Masters:
    """ZeRO 1 and 2: the parameters of a group lie one after the other, and each rank has an equal run of that."""
    return Masters.of(_fragments_of_stages_1_and_2(files, groups_of))


def masters_of_stage_3(files: CheckpointFiles) -> Masters:
    """ZeRO 3: each parameter is cut into equal runs, over all ranks or over those that hold the same experts."""
    return Masters.of(_fragments_of_stage_3(files))


def _fragments_of_stages_1_and_2(files: CheckpointFiles, groups_of: GroupsOf) -> Iterator[Fragment]:
    model_states = {tp: load_lazily(files.model_states[0, tp]) for tp in range(files.tp_size)}
    partition_sizes: dict[tuple[int, int, int], int] = {}
    for dp, tp in sorted(files.shards):
        state = load_lazily(files.shards[dp, tp])["optimizer_state_dict"]
        shapes_of_groups = model_states[tp]["param_shapes"]
        paddings = paddings_of_groups(state, shapes_of_groups)
        if not isinstance(state["base_optimizer_state"], dict):
            raise CheckpointError(
                f"{files.shards[dp, tp]}: does not say which values are experts'. Save the run without "
                "zero_optimization.elastic_checkpoint."
            )
        options = state["base_optimizer_state"]["param_groups"]
        for group, flat in enumerate(state["single_partition_of_fp32_groups"]):
            place, ep_size, part = tp, 0, dp
            if options[group].get("moe"):
                place, ep_size, part = _place(dp * files.tp_size + tp, options[group]["name"], groups_of)
            # Ranks come in order, so this is that of the first part, which is never cut short as the last one is.
            size = partition_sizes.setdefault((group, place, ep_size), flat.numel())
            runs = runs_of_partition(
                shapes_of_groups[group], paddings[group], size=size, part=part, length=flat.numel()
            )
            for name, run in runs:
                yield Fragment(name, place, ep_size, flat[slice(*run)])


def _place(rank: int, name: str, groups_of: GroupsOf) -> tuple[int, int, int]:
    """A rank's place in its expert-parallel group, the group's size, and the rank's among those with the same place."""
    groups = [list(group) for group in groups_of(name)]
    for group in groups:
        if rank in group:
            place = group.index(rank)
            return place, len(group), sorted(other[place] for other in groups).index(rank)
    raise CheckpointError(
        f"ds_hybrid.json: expert_groups of {name} is {groups}, without rank {rank}. Restore the file from the run."
    )


def _fragments_of_stage_3(files: CheckpointFiles) -> Iterator[Fragment]:
    for dp, tp in sorted(files.shards):
        state = load_lazily(files.shards[dp, tp])["optimizer_state_dict"]
        model_state = load_lazily(files.model_states[dp, tp])
        layer: Mapping[str, Any] = next(iter(model_state["ds_autoep_layers"] or ()), {})
        groups = state.get("ds_zero_partition_groups") or [{}] * len(state["fp32_flat_groups"])
        for shapes, flat, group in zip(model_state["param_shapes"], state["fp32_flat_groups"], groups, strict=True):
            is_expert = "autoep_expert" in group.get("families", ())
            place, ep_size = (layer["ep_rank"], layer["ep_size"]) if is_expert else (tp, 0)
            count = group.get("partition_count", state["partition_count"])
            start = 0
            for name, shape in shapes.items():
                length = math.ceil(math.prod(shape) / count)
                yield Fragment(name, place, ep_size, flat[start : start + length])
                start += length
