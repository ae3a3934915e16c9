"""The MoE layers of a checkpoint: what they are called, and which slot holds which expert."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_hybrid.engine.checkpoint import CARRIED_KEY, RECORD_NAME, described_slots, load_lazily
from ds_hybrid.errors import CheckpointError, PlacementError
from ds_hybrid.hf.files import CheckpointFiles
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.topology.layout import consecutive_groups

_EXPLICIT_PATH = re.compile(r"(?P<path>.*?)\.?deepspeed_moe\.experts\.deepspeed_experts\.\d+\.")


@dataclass(frozen=True)
class SavedLayer:
    """One MoE layer.

    Attributes:
        name: its path in the model.
        index: of its expert files.
        is_converted: by AutoEP; else an explicit layer.
        expert_of_slot: [E], the logical expert in each slot, rank after rank.
        ep_size: ranks that share the experts; 1 for an explicit layer of which nothing is written.
    """

    name: str
    index: int
    is_converted: bool
    expert_of_slot: tuple[int, ...]
    ep_size: int = 1

    @property
    def prefix(self) -> str:
        return f"{self.name}." if self.name else ""

    @property
    def experts_of_rank(self) -> list[tuple[int, ...]]:
        num_slots = len(self.expert_of_slot) // self.ep_size
        return [
            self.expert_of_slot[first : first + num_slots] for first in range(0, len(self.expert_of_slot), num_slots)
        ]


@dataclass(frozen=True)
class SavedRecord:
    """What ds_hybrid has written beside DeepSpeed's files; empty for a checkpoint of DeepSpeed alone.

    Attributes:
        expert_groups: by names such as "ep_size_4", all expert-parallel groups.
        placements: by layer, ``ExpertPlacement.expert_of_slot`` [P, E/P].
    """

    expert_groups: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    placements: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> SavedRecord:
        path = folder / RECORD_NAME
        if not path.is_file():
            return cls()
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            return cls(document.get("expert_groups") or {}, document.get("placements") or {})
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON ({error}). Restore it from the run.") from None

    def groups(self, name: str, model_state: Mapping[str, Any]) -> Sequence[Sequence[int]]:
        """The recorded groups of that name; where there are none, those that DeepSpeed makes."""
        if name in self.expert_groups:
            return self.expert_groups[name]
        num_ranks = int(model_state["dp_world_size"]) * int(model_state["mp_world_size"])
        size = int(name.rpartition("_")[2])
        if model_state["ds_config"].get("use_data_before_expert_parallelism", False):
            num_groups = num_ranks // size
            return tuple(tuple(range(first, num_ranks, num_groups)) for first in range(num_groups))
        return consecutive_groups(num_ranks, size)


def saved_layers(files: CheckpointFiles, model_state: Mapping[str, Any], record: SavedRecord) -> tuple[SavedLayer, ...]:
    """In the model's order.

    Raises:
        CheckpointError: files of experts are missing, or what is written about placements does not agree.
    """
    converted = {entry["moe_layer_id"]: entry for entry in model_state.get("ds_autoep_layers") or ()}
    carried = (model_state.get(CARRIED_KEY) or {}).get("placements") or {}
    sizes = list(model_state.get("num_experts") or ())
    layers = []
    for index in sorted({layer for layer, _ in files.experts} | converted.keys()):
        num_experts = converted[index]["num_experts"] if index in converted else sizes[index]
        partitioned = index in converted and files.weights_are_partitioned
        missing = [] if partitioned else [slot for slot in range(num_experts) if (index, slot) not in files.experts]
        if missing:
            raise CheckpointError(
                f"{files.folder}/layer_{index}_expert_{missing[0]}_mp_rank_00_model_states.pt: missing, with "
                f"{len(missing) - 1} more of {num_experts}. Copy the files of all hosts into one folder."
            )
        name = converted[index]["module_path"] if index in converted else _explicit_name(files.experts[index, 0])
        layers.append(_layer(name, index, num_experts, converted.get(index), record, carried, files.folder))
    strangers = record.placements.keys() - {layer.name for layer in layers}
    if strangers:
        raise CheckpointError(
            f"{files.folder / RECORD_NAME}: placements names {', '.join(sorted(strangers))}; the checkpoint's MoE "
            f"layers are {', '.join(layer.name for layer in layers) or 'none'}. Restore the file from the run."
        )
    return tuple(layers)


def _layer(
    name: str,
    index: int,
    num_experts: int,
    converted: Mapping[str, Any] | None,
    record: SavedRecord,
    carried: Mapping[str, Sequence[Sequence[int]]],
    folder: Path,
) -> SavedLayer:
    recorded = record.placements.get(name)
    in_files = carried.get(name) if converted is None else described_slots(converted)
    if recorded is not None and in_files is not None and [list(rank) for rank in recorded] != in_files:
        raise CheckpointError(
            f"{folder / RECORD_NAME}: placements of {name} is {recorded}, the other files say {in_files}. Both are "
            "written by one save: restore the file from the run."
        )
    slots = recorded if recorded is not None else in_files
    if slots is None:
        return SavedLayer(name, index, False, tuple(range(num_experts)))
    try:
        placement = ExpertPlacement.from_slots(slots)
    except (PlacementError, ValueError) as error:
        raise CheckpointError(
            f"{folder / RECORD_NAME}: placements of {name}: {error} Restore it from the run."
        ) from None
    if placement.num_experts != num_experts:
        raise CheckpointError(
            f"{folder / RECORD_NAME}: placements of {name} has {placement.num_experts} experts, the checkpoint "
            f"{num_experts}. Restore the file from the run."
        )
    flat = tuple(placement.expert_of_slot.ravel().tolist())
    return SavedLayer(name, index, converted is not None, flat, placement.num_ranks)


def _explicit_name(path: Path) -> str:
    match = next(filter(None, map(_EXPLICIT_PATH.match, load_lazily(path))), None)
    if match is None:
        raise CheckpointError(f"{path}: holds no expert of a MoE layer. Save the checkpoint again.")
    return match["path"]
