"""A checkpoint becomes DeepSpeed's universal one, to load at other sizes: every state whole, experts in logical order.

DeepSpeed's own converter serves ZeRO 3, where it minds the placement of experts. For ZeRO 1 and 2 it drops the
placement and joins experts by slot, takes expert groups for ranks at equal distances, and refuses explicit layers; so
what it would write is written here, in its format, and DeepSpeed loads it. Offline, one process, one parameter in
memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    CAT_DIM,
    EP_IS_EXPERT_PARAM,
    EP_NUM_EXPERTS,
    OPTIMIZER_STATE_DICT,
    PARAM,
    PARAM_GROUPS,
    PARAM_SHAPES,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
    ZERO_STAGE,
)
from torch import Tensor

from ds_hybrid.engine.checkpoint import (
    LATEST_UNIVERSAL,
    RECORD_NAME,
    Record,
    SavedCheckpoint,
    load_lazily,
    read_folder,
    read_model_states,
    recorded_placements,
)
from ds_hybrid.engine.expert_names import ExpertLayer, expert_layer_of, logical_name, slot_name
from ds_hybrid.engine.partitions import paddings_of_groups, runs_of_partition
from ds_hybrid.engine.staging import name_latest, read_latest
from ds_hybrid.errors import CheckpointError
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.topology.layout import consecutive_groups

_OF_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_EXPERT_FILE = re.compile(r"layer_\d+_expert_(\d+)_mp_rank_00_model_states\.pt")


def convert(save_dir: str | Path, tag: str | None = None) -> Path:
    """Write ``<tag>_universal`` beside the checkpoint, and let ``latest_universal`` name it.

    Args:
        tag: None for the one that the file ``latest`` names.

    Returns:
        The new folder. ``{"checkpoint": {"load_universal": true}}`` in the ds_config loads it from ``save_dir``.

    Raises:
        CheckpointError: what is there cannot be converted, or has been.
    """
    root = Path(save_dir)
    tag = read_latest(root) if tag is None else tag
    if tag is None:
        raise CheckpointError(f"{root}/latest: missing. Give the checkpoint's tag.")
    saved = read_folder(root / tag)
    if saved is None:
        raise CheckpointError(f"{root / tag}: no such checkpoint.")
    target = root / f"{tag}_universal"
    if target.exists():
        raise CheckpointError(f"{target}: exists already. Remove it to convert {tag} again.")
    work = root / f"{tag}_universal.saving"
    shutil.rmtree(work, ignore_errors=True)
    try:
        _write(saved, root / tag, work / target.name)
        (work / target.name).rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    name_latest(root, target.name, LATEST_UNIVERSAL)
    return target


def _write(saved: SavedCheckpoint, source: Path, target: Path) -> None:
    placements = recorded_placements(saved)
    shards = _shards_by_rank(source)
    stage = int(shards[0].get(ZERO_STAGE, 1))
    (target / "zero").mkdir(parents=True)
    if stage == 3:
        _refuse_frozen(source)
        _convert_with_deepspeed(source, target)
    else:
        layers = _expert_layers(saved, placements, world_size=len(shards))
        _write_states(_Partitions(source, shards, layers), target / "zero")
        shutil.copy2(source / "mp_rank_00_model_states.pt", target)
    in_order = {name: [list(range(placement.num_experts))] for name, placement in placements.items()}
    record = replace(saved.record or Record({}, {}, {}), placements=in_order)
    (target / RECORD_NAME).write_text(json.dumps(asdict(record), indent=1) + "\n")


def _shards_by_rank(source: Path) -> list[dict[str, Any]]:
    """What each rank saved of the optimizer, still on the disk.

    Raises:
        CheckpointError: there is nothing to convert, some of it is missing, or tensor parallelism has parted it.
    """
    files = {int(match[1]): path for path in source.iterdir() if (match := _OF_RANK.fullmatch(path.name))}
    if (source / "zero").is_dir():
        raise CheckpointError(f"{source}: is a universal checkpoint already.")
    if not files:
        raise CheckpointError(
            f"{source}: no zero_pp_rank_*_optim_states.pt. Without ZeRO, a checkpoint loads at other sizes as it is."
        )
    if list(source.glob("*mp_rank_01*")):
        raise CheckpointError(
            f"{source}: saved with tensor parallelism, which is not converted. Load it at the sizes that saved it."
        )
    missing = set(range(max(files) + 1)) - files.keys()
    if missing:
        raise CheckpointError(f"{source}: the optimizer states of ranks {sorted(missing)} are missing.")
    return [load_lazily(files[rank])[OPTIMIZER_STATE_DICT] for rank in range(len(files))]


def _expert_layers(
    saved: SavedCheckpoint, placements: Mapping[str, ExpertPlacement], *, world_size: int
) -> dict[str, ExpertLayer]:
    layers = {}
    for name, placement in placements.items():
        ep_size = placement.num_ranks
        groups: Sequence[Sequence[int]] = consecutive_groups(world_size, ep_size)
        if saved.record is not None:
            groups = saved.record.expert_groups[f"ep_size_{ep_size}"]
        layers[name] = ExpertLayer(name, placement, stacked=name in saved.described, groups=groups)
    return layers


@dataclass(frozen=True)
class _Partitions:
    """The files of ZeRO 1 or 2.

    Attributes:
        shards: of each rank.
        layers: the MoE layers by name.
    """

    source: Path
    shards: Sequence[Mapping[str, Any]]
    layers: Mapping[str, ExpertLayer]

    @cached_property
    def shapes(self) -> Sequence[Mapping[str, Sequence[int]]]:
        """Of the parameters that are trained, by group and name, in the order of the files."""
        shapes: Sequence[Mapping[str, Sequence[int]]] = read_model_states(self.source)[PARAM_SHAPES]
        return shapes

    def assemble(self, name: str, ranks: Sequence[int]) -> dict[str, Any]:
        """A parameter's master and optimizer states from the ranks that have a part of it each, in their order."""
        group = next(number for number, shapes in enumerate(self.shapes) if name in shapes)
        shape = torch.Size(self.shapes[group][name])
        parts: dict[str, list[Any]] = {}
        for part, rank in enumerate(ranks):
            for key, value in self._fragments(name, group, part, rank, first_rank=ranks[0]):
                parts.setdefault(key, []).append(value)
        whole: dict[str, Any] = {}
        for key, values in parts.items():
            if not isinstance(values[0], Tensor) or not values[0].ndim:
                whole[key] = values[0]
                continue
            flat = torch.cat(values)
            if flat.numel() != shape.numel():
                raise CheckpointError(
                    f"{self.source}: the ranks {list(ranks)} have {flat.numel()} values of {name} {key}, must have "
                    f"{shape.numel()}. The files are not of one checkpoint."
                )
            whole[key] = flat.view(shape)
        return whole

    def _fragments(self, name: str, group: int, part: int, rank: int, *, first_rank: int) -> Iterator[tuple[str, Any]]:
        """A rank's part of a parameter's master and states, and the numbers that it keeps once, such as "step"."""
        shard = self.shards[rank]
        master = shard[SINGLE_PARTITION_OF_FP32_GROUPS][group]
        size = self.shards[first_rank][SINGLE_PARTITION_OF_FP32_GROUPS][group].numel()
        paddings = paddings_of_groups(shard, self.shapes)[group]
        runs = dict(runs_of_partition(self.shapes[group], paddings, size=size, part=part, length=master.numel()))
        if name not in runs:
            return
        run = slice(*runs[name])
        yield "fp32", master[run]
        base = shard[BASE_OPTIMIZER_STATE]
        state = base["state"].get(base[PARAM_GROUPS][group]["params"][0], {})
        for key, value in state.items():
            yield key, value[run] if isinstance(value, Tensor) and value.ndim else value


def _write_states(saved: _Partitions, target: Path) -> None:
    every_rank = range(len(saved.shards))
    names = [name for shapes in saved.shapes for name in shapes]
    for name in names:
        layer = expert_layer_of(name, saved.layers)
        if layer is None:
            _save(target / name, saved.assemble(name, every_rank), {CAT_DIM: 0})
            continue
        of_place = [saved.assemble(name, layer.ranks_at(place)) for place in range(layer.placement.num_ranks)]
        if layer.stacked:
            _save(target / name, _join_experts(of_place, layer), _stacked_marks(layer))
            continue
        for place, states in enumerate(of_place):
            _save(target / logical_name(name, layer.placement.expert_of_slot[place]), states, {CAT_DIM: 0})
    _write_untrained_experts(saved, set(names), target)
    first = saved.shards[0]
    parted = (BASE_OPTIMIZER_STATE, PARAM_SLICE_MAPPINGS, SINGLE_PARTITION_OF_FP32_GROUPS)
    # The names of experts' groups have the number of ranks in them: those of the run that loads must stay.
    groups = [
        {key: value for key, value in group.items() if key not in ("name", "moe")}
        for group in first[BASE_OPTIMIZER_STATE][PARAM_GROUPS]
    ]
    common = {key: value for key, value in first.items() if key not in parted}
    torch.save({**common, PARAM_GROUPS: groups}, target / "optimizer_state.pt")


def _join_experts(of_place: Sequence[Mapping[str, Any]], layer: ExpertLayer) -> dict[str, Any]:
    """The experts of all ranks in logical order: [E/P, ...] each -> [E, ...]."""
    order = torch.from_numpy(layer.placement.expert_of_slot.ravel().argsort())
    joined = {}
    for key, value in of_place[0].items():
        parted = isinstance(value, Tensor) and value.ndim
        joined[key] = torch.cat([states[key] for states in of_place])[order] if parted else value
    return joined


def _stacked_marks(layer: ExpertLayer) -> dict[str, Any]:
    return {CAT_DIM: 0, EP_IS_EXPERT_PARAM: True, EP_NUM_EXPERTS: layer.placement.num_experts}


def _save(folder: Path, states: Mapping[str, Any], marks: Mapping[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    for key, value in states.items():
        whole = {PARAM: value.clone(), **marks} if isinstance(value, Tensor) and value.ndim else value
        torch.save(whole, folder / f"{key}.pt")


def _write_untrained_experts(saved: _Partitions, trained: set[str], target: Path) -> None:
    """What experts have and no optimizer steps: frozen parameters, buffers. It lies in a file for each slot."""
    stacks: dict[str, dict[int, Tensor]] = {}
    for path in sorted(saved.source.iterdir()):
        match = _EXPERT_FILE.fullmatch(path.name)
        for name, value in load_lazily(path).items() if match else ():
            slot = int(match[1]) if match else 0
            layer = expert_layer_of(name, saved.layers)
            assert layer is not None, f"{path}: {name} is of no layer that the record names"
            expert = int(layer.placement.expert_of_slot.ravel()[slot])
            if layer.stacked:
                stack = name.removesuffix(f".{slot}")
                if stack not in trained:
                    stacks.setdefault(stack, {})[expert] = value
            elif slot_name(name, slot % layer.placement.num_slots) not in trained:
                _save(target / slot_name(name, expert), {"fp32": value}, {CAT_DIM: 0})
    for name, of_expert in stacks.items():
        layer = expert_layer_of(name, saved.layers)
        assert layer is not None
        whole = torch.stack([of_expert[expert] for expert in range(layer.placement.num_experts)])
        _save(target / name, {"fp32": whole}, _stacked_marks(layer))


def _refuse_frozen(source: Path) -> None:
    frozen = read_model_states(source).get("frozen_param_shapes") or {}
    if frozen:
        raise CheckpointError(
            f"{source}: {next(iter(frozen))} is frozen, and ZeRO 3 has parted it over the ranks: not converted. Load "
            "it at the sizes that saved it."
        )


def _convert_with_deepspeed(source: Path, target: Path) -> None:
    options = Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(options)
