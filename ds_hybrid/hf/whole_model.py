"""A whole model from a checkpoint: every expert in logical order, every value from its fp32 master."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.affine import ParamAffineMap
from torch import Tensor

from ds_hybrid.engine.checkpoint import load_lazily
from ds_hybrid.errors import CheckpointError
from ds_hybrid.hf.experts import expert_weights, logical_experts
from ds_hybrid.hf.files import CheckpointFiles, find_files
from ds_hybrid.hf.layers import SavedRecord, saved_layers
from ds_hybrid.hf.masters import Masters, masters_of_stage_3, masters_of_stages_1_and_2
from ds_hybrid.hf.unnamed_masters import Weights, masters_without_zero


def whole_state_dict(
    checkpoint: str | Path, tag: str | None = None, *, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The state dict of the whole model, from the files alone: no process group, one copy of the model in memory.

    Reads what a :class:`ds_hybrid.MoEEngine`, or DeepSpeed's own engine, has saved: ZeRO 0 to 3, any number of ranks,
    expert-parallel groups of any size, experts wherever they were moved.

    Args:
        checkpoint: the folder that ``save_checkpoint`` was given, or that of a tag in it.
        tag: None for the one that the file ``latest`` names.
        dtype: of the experts. What all ranks share is float32: it is small, and routes hang on it.

    Returns:
        By the names of the module that was trained. Experts of a layer that AutoEP has converted are ``experts.w1``,
        ``w2`` and ``w3``, [E, ...] in logical order; those of explicit layers are numbered logically.

    Raises:
        CheckpointError: a file is missing, or files contradict each other.
    """
    return SavedModel(find_files(checkpoint, tag)).state_dict(dtype)


class SavedModel:
    """A checkpoint's model.

    Attributes:
        files: where it is.
        layers: its MoE layers.
        ds_config: of the run.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        self._states = {tp: load_lazily(path) for (place, tp), path in sorted(files.model_states.items()) if place == 0}
        self._state = self._states[0]
        # Of the parameters that train, as each tensor-parallel rank has them.
        self._shapes: dict[int, dict[str, Sequence[int]]] = {
            tp: {name: shape for group in state["param_shapes"] or () for name, shape in group.items()}
            for tp, state in self._states.items()
        }
        self._record = SavedRecord.read(files.folder)
        self.ds_config: Mapping[str, Any] = self._state["ds_config"]
        self.layers = saved_layers(files, self._state, self._record)
        files.check_ranks(self._state["dp_world_size"], self._state["mp_world_size"])

    @property
    def names(self) -> Iterable[str]:
        """What is not an expert's, by the names of the module that was trained."""
        return self._state["module"].keys()

    def state_dict(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """See :func:`whole_state_dict`."""
        masters = self._masters()
        state = dict(self._dense(masters))
        for layer in self.layers:
            state.update(logical_experts(layer, self.files, masters, self._shapes[0], dtype))
        for name, owner in self._shared.items():
            if owner in state:
                state[name] = state[owner]
        return state

    @property
    def _shared(self) -> Mapping[str, str]:
        """Names of tied parameters, and under which other name their values are."""
        return self._state.get("shared_params") or {}

    def _masters(self) -> Masters:
        if self.files.weights_are_partitioned:
            return masters_of_stage_3(self.files)
        if self.files.shards:
            return masters_of_stages_1_and_2(self.files, lambda name: self._record.groups(name, self._state))
        return masters_without_zero(self.files, self._weights)

    def _weights(self) -> Weights:
        weights = {(name, tp): value for tp, state in self._states.items() for name, value in state["module"].items()}
        for layer in self.layers:
            weights.update(expert_weights(layer, self.files))
        return weights

    def _dense(self, masters: Masters) -> Iterator[tuple[str, Tensor]]:
        """What is not an expert's, in the module's order."""
        cuts = _cuts(self._state)
        left_out = {*self._shared, *self._router_aliases()}
        for name in self._state["module"]:
            if name in left_out:
                continue
            cut = next((cut for pattern, cut in cuts.items() if pattern.match(name)), None)
            if cut is None:
                value = self._shard(name, 0, masters)
            else:
                value = cut.rebuild({tp: self._shard(name, tp, masters).float() for tp in self._states})
            yield name, value.detach().float() if value.is_floating_point() else value

    def _shard(self, name: str, tp: int, masters: Masters) -> Tensor:
        """What a tensor-parallel rank has."""
        value: Tensor = self._states[tp]["module"][name]
        master = masters.get(name, self._shapes[tp].get(name, value.shape), tp)
        if master is not None:
            return master
        if self.files.weights_are_partitioned and name not in self._state["buffer_names"]:
            return self._frozen_of_stage_3(name, tp)
        return value

    def _frozen_of_stage_3(self, name: str, tp: int) -> Tensor:
        shape = (self._states[tp]["frozen_param_shapes"] or {}).get(name)
        if shape is None:
            raise CheckpointError(
                f"{self.files.folder}: no file holds {name}. Save the checkpoint without exclude_frozen_parameters."
            )
        states = [load_lazily(self.files.model_states[place, tp]) for place in range(self._state["dp_world_size"])]
        fragments = [state["frozen_param_fragments"][name] for state in states]
        return torch.cat(fragments)[: math.prod(shape)].view(*shape)

    def _router_aliases(self) -> Iterator[str]:
        """A converted layer may have its router twice, the second time by the name of the Hugging Face block."""
        module = self._state["module"]
        for layer in self.layers:
            for name in module if layer.is_converted else ():
                first, _, rest = name.removeprefix(layer.prefix).partition(".")
                if name.startswith(layer.prefix) and first != "router" and f"{layer.prefix}router.{rest}" in module:
                    yield name


def _cuts(state: Mapping[str, Any]) -> dict[re.Pattern[str], ParamAffineMap]:
    """How AutoTP has cut parameters, by patterns of their names, as DeepSpeed writes it down."""
    described = (state.get("universal_checkpoint_info") or {}).get("affine_map") or {"params": {}}
    return {re.compile(pattern): ParamAffineMap.from_dict(cut) for pattern, cut in described["params"].items()}
