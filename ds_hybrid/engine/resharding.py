"""What DeepSpeed leaves undone when a checkpoint is loaded at other sizes than it was saved with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybrid.engine.checkpoint import SavedCheckpoint, load_lazily, read_model_states
from ds_hybrid.engine.expert_names import ExpertLayer, expert_layer_of, logical_name, slot_name
from ds_hybrid.moe.autoep import HybridAutoEPLayer
from ds_hybrid.moe.kinds import MoELayer
from ds_hybrid.placement import ExpertPlacement


class LocalNames:
    """The names of this rank's parameters, and what they are called in the whole model.

    Args:
        layers: the MoE layers by name, placed as they are to be.
    """

    def __init__(self, layers: Mapping[str, MoELayer]) -> None:
        self._place = {name: layer.switch.group.rank for name, layer in layers.items()}
        self._layers = {
            name: ExpertLayer(name, layer.placement, stacked=isinstance(layer, HybridAutoEPLayer))
            for name, layer in layers.items()
        }

    def layer_of(self, name: str) -> ExpertLayer | None:
        """The layer of whose experts this is a parameter."""
        return expert_layer_of(name, self._layers)

    def experts_of(self, layer: ExpertLayer) -> list[int]:
        """The logical experts in the slots of this rank."""
        experts: list[int] = layer.placement.expert_of_slot[self._place[layer.name]].tolist()
        return experts

    def expert(self, layer: ExpertLayer, name: str) -> int:
        """The logical expert whose parameter this is, of an explicit layer."""
        return self.experts_of(layer)[int(name.removeprefix(layer.prefix).partition(".")[0])]

    def whole(self, name: str) -> str:
        """In a converted layer, all experts have one name."""
        layer = self.layer_of(name)
        return name if layer is None or layer.stacked else logical_name(name, self.experts_of(layer))


@contextlib.contextmanager
def whole_names(names: MutableMapping[Any, str], local: LocalNames) -> Iterator[None]:
    """Let DeepSpeed's optimizers look for explicit experts under the whole model's names meanwhile."""
    before = dict(names)
    names.update({parameter: local.whole(name) for parameter, name in before.items()})
    try:
        yield
    finally:
        names.update(before)


def load_untrained(module: nn.Module, folder: Path, local: LocalNames) -> None:
    """From a universal checkpoint: buffers, and parameters that no optimizer steps. DeepSpeed loads neither."""
    whole = read_model_states(folder)["module"]
    parameters = {name: p for name, p in module.named_parameters() if not p.requires_grad and not hasattr(p, "ds_id")}
    with torch.no_grad():
        for name, tensor in [*parameters.items(), *module.named_buffers()]:
            layer = local.layer_of(name)
            path = folder / "zero" / local.whole(name) / "fp32.pt"
            if layer is None and name in whole:
                tensor.copy_(whole[name])
            elif layer is not None and path.is_file():
                value = load_lazily(path)["param"]
                tensor.copy_(value[local.experts_of(layer)] if layer.stacked else value)


def load_unparted_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Any, str],
    local: LocalNames,
    saved: SavedCheckpoint,
    placements: Mapping[str, ExpertPlacement],
) -> None:
    """The optimizer's state of a run without ZeRO, from the files of a run with other expert-parallel groups.

    Args:
        names: of each parameter of this rank.
        placements: those of the checkpoint.
    """
    files = _SavedOptimizers(saved, placements)
    state: dict[int, dict[str, Any]] = {}
    groups = optimizer.state_dict()["param_groups"]
    for own, live in zip(groups, optimizer.param_groups, strict=True):
        for number, parameter in zip(own["params"], live["params"], strict=True):
            name = names[parameter]
            layer = local.layer_of(name)
            if layer is None:
                found = files.state(0, name)
            elif layer.stacked:
                found = files.stack(layer, name, local.experts_of(layer))
            else:
                expert = local.expert(layer, name)
                name = files.slot_name(layer, name, expert)
                found = files.state(files.file(layer, expert), name)
            if found:
                state[number] = found
            own |= {key: value for key, value in files.group(name).items() if key not in ("params", "name", "moe")}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


class _SavedOptimizers:
    """The optimizer states in the files of the first replica's ranks."""

    def __init__(self, saved: SavedCheckpoint, placements: Mapping[str, ExpertPlacement]) -> None:
        assert saved.record is not None
        assert saved.optimizer_names is not None
        self._placements = placements
        self._number = {name: number for number, name in enumerate(saved.optimizer_names)}
        groups = saved.record.expert_groups
        largest = groups[f"ep_size_{max(placement.num_ranks for placement in placements.values())}"]
        self._writers = [min(group[place] for group in largest) for place in range(len(largest[0]))]
        self._place = {
            name: {rank: group.index(rank) for group in lists for rank in group} for name, lists in groups.items()
        }
        self._files = [
            load_lazily(Path(saved.folder, f"expp_rank_{place}_mp_rank_00_optim_states.pt"))["optimizer"]
            for place in range(len(self._writers))
        ]

    def group(self, name: str) -> dict[str, Any]:
        """The options of the parameter group that the parameter was in."""
        number = self._number[name]
        return next(group for group in self._files[0]["param_groups"] if number in group["params"])

    def state(self, file: int, name: str) -> dict[str, Any]:
        state: dict[str, Any] = self._files[file]["state"].get(self._number[name], {})
        return state

    def stack(self, layer: ExpertLayer, name: str, experts: list[int]) -> dict[str, Any]:
        """Of a converted layer's tensor with these experts."""
        slots = self._placements[layer.name].slot_of_expert
        states = [(self.state(self.file(layer, expert), name), int(slots[expert])) for expert in experts]
        return {
            key: torch.stack([state[key][slot] for state, slot in states])
            if isinstance(value, Tensor) and value.ndim
            else value
            for key, value in states[0][0].items()
        }

    def slot_name(self, layer: ExpertLayer, name: str, expert: int) -> str:
        """What the rank that had an explicit expert called its parameter."""
        return slot_name(name, int(self._placements[layer.name].slot_of_expert[expert]))

    def file(self, layer: ExpertLayer, expert: int) -> int:
        """The file of a rank that had an expert."""
        placement = self._placements[layer.name]
        place_of = self._place[f"ep_size_{placement.num_ranks}"]
        place = int(placement.rank_of_expert[expert])
        return next(file for file, rank in enumerate(self._writers) if place_of[rank] == place)
