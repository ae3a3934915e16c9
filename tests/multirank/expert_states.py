"""All that training needs of every expert, gathered by DeepSpeed's own means, in the model's numbering."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor

from ds_hybrid.moe.autoep import HybridAutoEPLayer

MOMENTS = ("exp_avg", "exp_avg_sq")

States = dict[tuple[str, int, str, str], Tensor]
"""By layer, logical expert, tensor and state."""


def expert_states(engine: Any) -> States:
    """On every rank. All replicas of an expert are found to be equal on the way."""
    of_rank: list[States] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_rank, _local_states(engine))
    whole: States = {}
    for states in of_rank:
        for key, value in states.items():
            assert torch.equal(whole.setdefault(key, value), value), f"replicas differ in {key}"
    return whole


def _local_states(engine: Any) -> States:
    link_all_states(engine.optimizer)
    states: States = {}
    for name, layer in engine.moe_layers_by_name().items():
        ids = layer.placement.expert_of_slot[dist.get_rank(_expert_group(layer))].tolist()
        if isinstance(layer, HybridAutoEPLayer):
            for tensor in ("w1", "w2", "w3"):
                for state, value in _full_states(engine, getattr(layer.experts, tensor)).items():
                    states |= {(name, expert, tensor, state): value[slot].clone() for slot, expert in enumerate(ids)}
        else:
            for expert, module in zip(ids, layer.deepspeed_moe.experts.deepspeed_experts, strict=True):
                for tensor, parameter in module.named_parameters():
                    full = _full_states(engine, parameter)
                    states |= {(name, expert, tensor, state): value.clone() for state, value in full.items()}
    return states


def _expert_group(layer: Any) -> Any:
    return layer.switch.group.process_group


def _full_states(engine: Any, parameter: Any) -> dict[str, Tensor]:
    """The whole parameter's weights, master and moments. Collective over its replicas."""
    optimizer = engine.optimizer
    if not parameter.requires_grad:
        with deepspeed.zero.GatheredParameters([parameter]):
            return {"weights": parameter.detach().clone()}
    if engine.zero_optimization_stage() == 0 and not hasattr(parameter, "_hp_mapping"):
        master = parameter
        if hasattr(optimizer, "fp32_groups"):  # bf16
            pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            master = next(m for group, ms in pairs for p, m in zip(group, ms, strict=True) if p is parameter)
        state = getattr(optimizer, "optimizer", optimizer).state[master]
        return {"weights": parameter.detach(), "master": master.detach()} | {key: state[key] for key in MOMENTS}
    with deepspeed.zero.GatheredParameters([parameter]):
        weights = parameter.detach().clone()
    moments = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
    full = {"weights": weights, "master": safe_get_full_fp32_param(parameter), **moments}
    return {state: value.view(weights.shape) for state, value in full.items()}


def link_all_states(optimizer: Any) -> None:
    """DeepSpeed 0.19.8 links the optimizer's state after the first group's step, and then to that group alone."""
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
