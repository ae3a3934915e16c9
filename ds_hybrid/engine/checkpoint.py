"""What a checkpoint of DeepSpeed's lacks: which ranks held which experts, where, and what chooses for each layer.

It stands beside DeepSpeed's files as ``ds_hybrid.json``. DeepSpeed numbers the files and shards of experts by slot, so
what is in them means nothing without the placement. The files themselves carry it too, so that a record of another
checkpoint is found out. DeepSpeed's own checkpoints have neither, and load as well: their experts are in order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import (
    AUTOEP_EXPERT_PLACEMENT,
    AUTOEP_LAYERS_KEY,
    AUTOEP_PLACEMENT_EXPERTS,
    AUTOEP_PLACEMENT_RANK,
    AUTOEP_PLACEMENT_RANKS,
)

from ds_hybrid.engine.staging import read_latest
from ds_hybrid.errors import CheckpointError, PlacementError
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.topology.layout import consecutive_groups

RECORD_NAME = "ds_hybrid.json"
LATEST_UNIVERSAL = "latest_universal"
CARRIED_KEY = "ds_hybrid"
"""Of the model states that DeepSpeed writes."""

Slots = Sequence[Sequence[int]]
"""``ExpertPlacement.expert_of_slot`` as lists: [P][E/P] logical experts."""


@dataclass(frozen=True)
class Record:
    """What is written down.

    Attributes:
        expert_groups: by DeepSpeed's name of their size, such as "ep_size_4", all expert-parallel groups of the run.
        dispatch: the state of :class:`ds_hybrid.engine.auto_dispatch.AutoDispatch`.
        placements: of each MoE layer by name.
        rebalance: the state of :class:`ds_hybrid.engine.rebalancer.Rebalancer`; empty where nothing moves by itself.
    """

    expert_groups: Mapping[str, Slots]
    dispatch: Mapping[str, Any]
    placements: Mapping[str, Slots]
    rebalance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedCheckpoint:
    """What a checkpoint says of itself.

    Attributes:
        folder: of its files, for messages.
        record: None where there is no ``ds_hybrid.json``.
        carried: the placements in the files themselves; None in a checkpoint that DeepSpeed has saved.
        described: the placements of AutoEP layers as DeepSpeed's own metadata has them.
        world_size: the data-parallel ranks that saved it; None where the files do not tell.
        optimizer_names: of its parameters in its order, where it was one of torch's own.
        is_universal: whether it is for any sizes, with experts in logical order.
    """

    folder: str
    record: Record | None
    carried: Mapping[str, Slots] | None
    described: Mapping[str, Slots]
    world_size: int | None
    optimizer_names: Sequence[str] | None = None
    is_universal: bool = False


def agree_on_tag(tag: str) -> None:
    """Every rank saves under one name. Collective over all ranks.

    Raises:
        CheckpointError: on every rank, when they do not.
    """
    of_rank: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(of_rank, tag)
    other = next((rank for rank, theirs in enumerate(of_rank) if theirs != of_rank[0]), None)
    if other is not None:
        raise CheckpointError(
            f'save_checkpoint(tag="{of_rank[0]}"): that is the tag of rank 0; rank {other} has "{of_rank[other]}". '
            "Give all ranks the same tag."
        )


def do_together(action: Callable[[], None] | None, *, doing: str) -> None:
    """Let the ranks that have something to do with files do it, and go on when all are ready. Collective.

    Raises:
        CheckpointError: on every rank, when one could not.
    """
    fault = None
    try:
        if action is not None:
            action()
    except OSError as error:
        fault = str(error)
    of_rank: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_rank, fault)
    failed = next((rank for rank, theirs in enumerate(of_rank) if theirs is not None), None)
    if failed is not None:
        raise CheckpointError(f"rank {failed} could not {doing}: {of_rank[failed]}. The previous checkpoint is whole.")


def write_record(folder: str | Path, record: Record) -> None:
    """Write ``ds_hybrid.json`` beside DeepSpeed's files, the last of them."""
    Path(folder, RECORD_NAME).write_text(json.dumps(asdict(record)) + "\n")


def read_saved(load_dir: str | Path, tag: str | None, *, latest: str = "latest") -> SavedCheckpoint | None:
    """What rank 0 finds, on every rank; None where there is no checkpoint. Collective over all ranks.

    Args:
        tag: None for the one that the file ``latest`` names.

    Raises:
        CheckpointError: on every rank, when the record cannot be read.
    """
    found: list[SavedCheckpoint | CheckpointError | None] = [None]
    if dist.get_rank() == 0:
        tag = read_latest(load_dir, latest) if tag is None else str(tag)
        try:
            found = [None if not tag else read_folder(Path(load_dir, tag))]
        except CheckpointError as error:
            found = [error]
        except Exception as error:  # whatever a broken file may raise: the other ranks wait
            found = [CheckpointError(f"{load_dir}/{tag}: {type(error).__name__}: {error}. Some file of it is broken.")]
    dist.broadcast_object_list(found)
    if isinstance(found[0], CheckpointError):
        raise found[0]
    return found[0]


def recorded_placements(saved: SavedCheckpoint) -> dict[str, ExpertPlacement]:
    """Where the checkpoint has the experts of each layer that it names.

    Raises:
        CheckpointError: the placement of a layer is missing, is none, or is not that of the files.
    """
    if saved.record is None:
        if saved.carried is not None or not all(map(is_in_order, saved.described.values())):
            raise CheckpointError(
                f"{saved.folder}/{RECORD_NAME}: missing. It tells which rank and slot holds which expert, and the "
                "other files were saved with it. Copy it from where they come from."
            )
        return {name: ExpertPlacement.from_slots(slots) for name, slots in saved.described.items()}
    placements = {}
    for name, slots in saved.record.placements.items():
        place = f"{saved.folder}/{RECORD_NAME}: placements: {name}"
        in_files = (saved.carried or {}).get(name)
        for source in (in_files, saved.described.get(name, in_files)):
            if source is None or [list(rank) for rank in source] != [list(rank) for rank in slots]:
                raise CheckpointError(
                    f"{place}: {slots}, the other files have {source}. The record belongs to another checkpoint. "
                    "Copy it from where the other files come from."
                )
        try:
            placements[name] = ExpertPlacement.from_slots(slots)
        except PlacementError as error:
            raise CheckpointError(f"{place}: {error}") from error
    return placements


def read_folder(folder: Path) -> SavedCheckpoint | None:
    if not folder.is_dir():
        return None
    path = folder / RECORD_NAME
    record = None
    if path.is_file():
        try:
            fields = json.loads(path.read_text())
            record = Record(
                fields["expert_groups"], fields["dispatch"], fields["placements"], fields.get("rebalance", {})
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: {type(error).__name__}: {error}. It is not the file that was saved with the checkpoint."
            ) from error
    state = read_model_states(folder)
    carried = state.get(CARRIED_KEY) or {}
    layers = state.get(AUTOEP_LAYERS_KEY) or []
    return SavedCheckpoint(
        folder=str(folder),
        record=record,
        carried=carried.get("placements"),
        described={entry["module_path"]: described_slots(entry) for entry in layers},
        world_size=state.get("dp_world_size"),
        optimizer_names=carried.get("optimizer_names"),
        is_universal=(folder / "zero").is_dir(),
    )


def read_model_states(folder: Path) -> dict[str, Any]:
    """What rank 0 saved of the model, its tensors still on the disk; empty where that is not among the files."""
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        if (folder / name).is_file():
            return load_lazily(folder / name)
    return {}


def load_lazily(path: Path) -> dict[str, Any]:
    """A file of ``torch.save``, tensors mapped rather than read where its format allows.

    As with every checkpoint of DeepSpeed, reading it may run code that it holds: read only what you trust.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except RuntimeError:  # the format before zip files
        return torch.load(path, map_location="cpu", weights_only=False)


def described_slots(entry: Mapping[str, Any]) -> Slots:
    """The placement in DeepSpeed's metadata of an AutoEP layer. Without one, experts are in order."""
    placement = entry.get(AUTOEP_EXPERT_PLACEMENT)
    if placement is None:
        return [list(group) for group in consecutive_groups(entry["num_experts"], entry["num_local_experts"])]
    ranks = sorted(placement[AUTOEP_PLACEMENT_RANKS], key=lambda rank: rank[AUTOEP_PLACEMENT_RANK])
    return [list(rank[AUTOEP_PLACEMENT_EXPERTS]) for rank in ranks]


def is_in_order(slots: Slots) -> bool:
    return [expert for rank in slots for expert in rank] == list(range(sum(map(len, slots))))
