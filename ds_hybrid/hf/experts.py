"""The experts of a checkpoint's MoE layer, slot by slot, put into logical order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ds_hybrid.engine.checkpoint import load_lazily
from ds_hybrid.errors import CheckpointError
from ds_hybrid.hf.files import CheckpointFiles
from ds_hybrid.hf.layers import SavedLayer
from ds_hybrid.hf.masters import Masters
from ds_hybrid.hf.unnamed_masters import Weights

_STACKED = ("w1", "w2", "w3")
_EXPLICIT = "deepspeed_moe.experts.deepspeed_experts"


def logical_experts(
    layer: SavedLayer,
    files: CheckpointFiles,
    masters: Masters,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """The layer's experts by the module's names, in ``dtype``.

    Args:
        shapes: of what each rank holds, by name; read with ZeRO stage 3, whose checkpoints have no files of experts.

    Raises:
        CheckpointError: masters and weights are not of the same experts.
    """
    if not layer.is_converted:
        yield from _explicit(layer, files, masters, dtype)
        return
    for name in (f"{layer.prefix}experts.{stacked}" for stacked in _STACKED):
        whole: Tensor | None = None
        for place, experts in enumerate(layer.experts_of_rank):
            local = _stacked(layer, files, masters, name, place, shapes)
            if whole is None:
                whole = torch.empty(len(layer.expert_of_slot), *local.shape[1:], dtype=dtype)
            whole[list(experts)] = local.to(dtype)
        assert whole is not None
        yield name, whole


def expert_weights(layer: SavedLayer, files: CheckpointFiles) -> Weights:
    """The weights in the expert files: stacked by rank if the layer is converted, else by slot."""
    if layer.is_converted:
        names = [f"{layer.prefix}experts.{stacked}" for stacked in _STACKED]
        places = range(len(layer.experts_of_rank))
        return {(name, place): _stack_of_files(layer, files, name, place) for place in places for name in names}
    slots = range(len(layer.expert_of_slot))
    return {(name, 0): value for slot in slots for name, value in load_lazily(files.experts[layer.index, slot]).items()}


def _stacked(
    layer: SavedLayer,
    files: CheckpointFiles,
    masters: Masters,
    name: str,
    place: int,
    shapes: Mapping[str, Sequence[int]],
) -> Tensor:
    """What one rank holds under ``name``, [E/P, ...]."""
    if files.weights_are_partitioned:
        master = masters.get(name, shapes[name], place)
        if master is None:
            raise CheckpointError(f"{files.folder}: no file holds {name} of rank {place} of an expert-parallel group.")
        return master
    num_slots = len(layer.experts_of_rank[place])
    first = load_lazily(files.experts[layer.index, place * num_slots])[f"{name}.{place * num_slots}"]
    master = masters.get(name, (num_slots, *first.shape), place)
    if master is None:
        return _stack_of_files(layer, files, name, place)
    _check(name, master[0], first, files)
    return master


def _stack_of_files(layer: SavedLayer, files: CheckpointFiles, name: str, place: int) -> Tensor:
    num_slots = len(layer.experts_of_rank[place])
    slots = range(place * num_slots, (place + 1) * num_slots)
    return torch.stack([load_lazily(files.experts[layer.index, slot])[f"{name}.{slot}"] for slot in slots])


def _explicit(
    layer: SavedLayer, files: CheckpointFiles, masters: Masters, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    prefix = f"{layer.prefix}{_EXPLICIT}."
    ep_size = next((size for name, size in masters.ep_sizes.items() if name.startswith(prefix)), 1)
    for expert, slot in sorted((expert, slot) for slot, expert in enumerate(layer.expert_of_slot)):
        place, local = divmod(slot, len(layer.expert_of_slot) // ep_size)
        for name, weight in load_lazily(files.experts[layer.index, slot]).items():
            inner = name.removeprefix(f"{prefix}{slot}.")
            master = masters.get(name, weight.shape)
            if master is None:
                master = masters.get(f"{prefix}{local}.{inner}", weight.shape, place)
            if master is not None:
                _check(name, master, weight, files)
            value = weight if master is None else master
            yield f"{prefix}{expert}.{inner}", value.to(dtype) if value.is_floating_point() else value


def _check(name: str, master: Tensor, weight: Tensor, files: CheckpointFiles) -> None:
    """A master, rounded, is the weight beside it; another expert's is not.

    Raises:
        CheckpointError: the ranks that held the experts are not those that the files' names lead to.
    """
    near = torch.allclose(master.to(weight.dtype).float(), weight.float(), rtol=2**-6, atol=1e-6, equal_nan=True)
    if not near:
        raise CheckpointError(
            f"{files.folder}: the optimizer's values of {name} are not those of the weights beside them: other ranks "
            "held these experts. Restore ds_hybrid.json from the run: its expert_groups say which."
        )
