"""The weights of the whole model on rank 0's CPU: all experts in logical order, shards of ZeRO-3 and AutoTP joined."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups, log_dist
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks

from ds_hybrid.engine.adapters import base_model
from ds_hybrid.moe.autoep import HybridAutoEPLayer
from ds_hybrid.moe.hugging_face_names import HuggingFaceBlock, hugging_face_blocks, to_hugging_face
from ds_hybrid.moe.kinds import MoELayer
from ds_hybrid.moe.layer import MoE


def save_whole_model(
    engine: DeepSpeedEngine,
    blocks: Sequence[HuggingFaceBlock],
    save_dir: str,
    save_filename: str,
    *,
    exclude_frozen_parameters: bool,
) -> bool:
    """What ``MoEEngine.save_16bit_model`` does; its result. All ranks call it."""
    path = Path(save_dir, save_filename)
    if engine.zero_optimization_partition_weights() and not engine.zero_gather_16bit_weights_on_model_save():
        log_dist(
            f"ds_hybrid: {path} is not saved: zero_optimization.stage3_gather_16bit_weights_on_model_save is false",
            ranks=[0],
            level=logging.WARNING,
        )
        return False
    state = gather_whole(engine, blocks, exclude_frozen_parameters=exclude_frozen_parameters)
    commit = CheckpointCommitInfo(tag=f"global_step{engine.global_steps}", save_dir=save_dir, save_latest=False)
    engine.checkpoint_engine.create(commit)
    if dist.get_rank() == 0:
        engine.checkpoint_engine.makedirs(save_dir, exist_ok=True)
        if path.suffix == ".safetensors":
            _save_safetensors(state, path)
        else:
            engine.checkpoint_engine.save(state, str(path))
    engine.checkpoint_engine.commit(commit)
    return True


def gather_whole(
    engine: DeepSpeedEngine, blocks: Sequence[HuggingFaceBlock], *, exclude_frozen_parameters: bool
) -> dict[str, Tensor]:
    """What ``MoEEngine.whole_state_dict`` does; its result. All ranks call it.

    Raises:
        RuntimeError: for any ValueError, which the Trainer would take for weights that are not to be gathered.
    """
    if engine._optimizer_has_ckpt_event_prologue():
        engine.optimizer.checkpoint_event_prologue()
    try:
        state = whole_weights(engine.module, blocks, exclude_frozen_parameters=exclude_frozen_parameters)
    except ValueError as error:
        raise RuntimeError(str(error)) from error
    if engine._optimizer_has_ckpt_event_epilogue():
        engine.optimizer.checkpoint_event_epilogue()
    return state


def whole_weights(
    model: nn.Module, blocks: Sequence[HuggingFaceBlock], *, exclude_frozen_parameters: bool = False
) -> dict[str, Tensor]:
    """The state dict of the whole model; empty on all ranks but the first. All ranks call it.

    One parameter at a time is gathered. A Hugging Face model has its own names again; others have their module's, and
    explicit experts are numbered logically.

    Args:
        model: the engine's module.
        blocks: what :func:`named_blocks` found in it.
        exclude_frozen_parameters: leave them out; the experts of a layer only when none of their weights trains.
    """
    state = dict(_walk(model, "", _experts_of_layers(model), not exclude_frozen_parameters))
    if dist.get_rank() != 0:
        return {}
    _tie(state, model)
    return to_hugging_face(state, blocks)


def named_blocks(model: nn.Module, expert_parallel: Mapping[str, Any]) -> tuple[HuggingFaceBlock, ...]:
    """The blocks that AutoEP will convert, by their names in ``model``; none where the model is not Hugging Face's.

    Args:
        model: not converted yet; it may be one of PEFT's.
        expert_parallel: that section of the ds_config.
    """
    base: Any = base_model(model)
    if not hasattr(getattr(base, "config", None), "model_type"):
        return ()
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
    return tuple(
        replace(block, spec=replace(block.spec, moe_module_name=f"{prefix}{block.spec.moe_module_name}"))
        for block in hugging_face_blocks(base, expert_parallel)
    )


def _save_safetensors(state: Mapping[str, Tensor], path: Path) -> None:
    """Of tied tensors the first name alone, as transformers writes and reads them."""
    from safetensors.torch import save_file

    names: dict[int, str] = {}
    for name, value in state.items():
        names.setdefault(value.data_ptr(), name)
    save_file({name: state[name] for name in names.values()}, path, metadata={"format": "pt"})


def _tie(state: dict[str, Tensor], model: nn.Module) -> None:
    """Names of one parameter have one tensor again."""
    first_name: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first_name.setdefault(parameter, name)
        if name in state and owner in state:
            state[name] = state[owner]


def _experts_of_layers(model: nn.Module) -> dict[nn.Module, MoELayer]:
    """The module that holds a layer's experts -> the layer."""
    layers: dict[nn.Module, MoELayer] = {}
    for layer in model.modules():
        if isinstance(layer, HybridAutoEPLayer):
            layers[layer.experts] = layer
        elif isinstance(layer, MoE):
            layers[layer.deepspeed_moe.experts] = layer
    return layers


def _walk(
    module: nn.Module, prefix: str, layers: Mapping[nn.Module, MoELayer], with_frozen: bool
) -> Iterator[tuple[str, Tensor]]:
    """On rank 0, every tensor below ``module`` by name, whole; nothing on other ranks, which go along."""
    if module in layers:
        yield from _experts(module, layers[module], prefix, with_frozen)
        return
    parameters = dict(module.named_parameters(recurse=False))
    with deepspeed.zero.GatheredParameters(list(parameters.values())), _shards_joined(module):
        for name, parameter in parameters.items():
            if dist.get_rank() == 0 and (with_frozen or parameter.requires_grad):
                yield f"{prefix}{name}", _to_cpu(parameter)
    for name, buffer in module.named_buffers(recurse=False):
        if dist.get_rank() == 0 and name not in module._non_persistent_buffers_set:
            yield f"{prefix}{name}", _to_cpu(buffer)
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", layers, with_frozen)


@contextmanager
def _shards_joined(module: nn.Module) -> Iterator[None]:
    """While open, parameters that AutoTP has cut are whole."""
    if not isinstance(module, TensorParallel_Layer):
        yield
        return
    parameters = list(module.parameters(recurse=False))
    shards = [parameter.data for parameter in parameters]
    module.gather_params(parameters)
    try:
        yield
    finally:
        for parameter, shard in zip(parameters, shards, strict=True):
            parameter.data = shard  # the same one: ZeRO's flat buffers go on seeing it


def _experts(module: nn.Module, layer: MoELayer, prefix: str, with_frozen: bool) -> Iterator[tuple[str, Tensor]]:
    """A layer's experts in logical order."""
    expert_of_slot = layer.placement.expert_of_slot
    with_frozen = with_frozen or any(parameter.requires_grad for parameter in module.parameters())
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and not with_frozen:
            continue
        with deepspeed.zero.GatheredParameters([value]):
            of_place = _from_every_place(value, layer)
        if not of_place:
            continue
        if isinstance(layer, HybridAutoEPLayer):
            whole = torch.empty(layer.num_experts, *of_place[0].shape[1:], dtype=value.dtype)
            whole[torch.from_numpy(expert_of_slot.flatten())] = torch.cat(of_place)
            yield f"{prefix}{name}", whole
        else:
            list_name, slot, inner = name.split(".", 2)
            for experts, of_slot in zip(expert_of_slot, of_place, strict=True):
                yield f"{prefix}{list_name}.{experts[int(slot)]}.{inner}", of_slot


def _from_every_place(value: Tensor, layer: MoELayer) -> list[Tensor]:
    """On rank 0, what the ranks of its expert-parallel group have, on the CPU; nothing on other ranks."""
    if layer.ep_size == 1:
        return [_to_cpu(value)] if dist.get_rank() == 0 else []
    name = layer.ep_group_name if isinstance(layer, HybridAutoEPLayer) else layer.expert_group_name
    ranks = get_process_group_ranks(groups._get_expert_parallel_group(name))
    if dist.get_rank() != 0:
        if 0 in ranks:
            dist.send(value.detach().contiguous(), 0)
        return []
    of_place = [_to_cpu(value)]  # rank 0 comes first in its group
    for rank in ranks[1:]:
        received = torch.empty_like(value, memory_format=torch.contiguous_format)
        dist.recv(received, rank)
        of_place.append(_to_cpu(received))
    return of_place


def _to_cpu(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)
