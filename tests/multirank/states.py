"""All that training has made of a model, in logical order: masters and optimizer states of every parameter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

import ds_hybrid
from ds_hybrid.moe.autoep import HybridAutoEPLayer
from ds_hybrid.placement import ExpertPlacement
from tests.multirank.expert_states import link_all_states

States = dict[str, dict[str, Tensor]]

_SLOT = re.compile(r"(?<=deepspeed_experts\.)\d+")


def random_placement(layer: HybridAutoEPLayer | ds_hybrid.MoE, seed: int) -> ExpertPlacement:
    """The same on every rank; in no rank are the experts where they begin."""
    order = np.random.default_rng(seed).permutation(layer.num_experts)
    return ExpertPlacement.from_slots(order.reshape(layer.ep_size, -1))


def logical_states(engine: Any) -> States:
    """By the whole model's names: "fp32", "exp_avg", "exp_avg_sq" where they are there; "untrained" values of the rest.

    Experts of converted layers are [E, ...] in logical order, those of explicit ones have logical numbers. Collective.
    """
    link_all_states(engine.optimizer)
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    local = {name: _states_of(engine, parameter) for name, parameter in trained.items()}
    local |= {
        name: {"untrained": value.detach().clone()}
        for name, value in engine.module.state_dict().items()
        if name not in trained
    }
    states: States = {}
    layers = engine.moe_layers_by_name()
    for name, values in local.items():
        layer = next((layers[key] for key in layers if _is_expert(name, key, layers[key])), None)
        if layer is None:
            states[name] = values
        else:
            states |= dict(_in_logical_order(name, values, layer))
    return states


def differences(first: States, second: States) -> list[str]:
    """What is not the same bit for bit."""
    assert first.keys() == second.keys(), first.keys() ^ second.keys()
    return [
        f"{name} {key}"
        for name in first
        for key in first[name].keys() | second[name].keys()
        if not torch.equal(first[name][key], second[name][key])
    ]


def _is_expert(name: str, layer_name: str, layer: nn.Module) -> bool:
    inner = "experts." if isinstance(layer, HybridAutoEPLayer) else "deepspeed_moe.experts."
    return name.startswith(f"{layer_name}.{inner}")


def _in_logical_order(name: str, values: dict[str, Tensor], layer: Any) -> Iterator[tuple[str, dict[str, Tensor]]]:
    of_rank: list[Any] = [None] * layer.ep_size
    dist.all_gather_object(of_rank, values, group=layer.switch.group.process_group)
    placement = layer.placement
    if isinstance(layer, HybridAutoEPLayer):
        pairs = list(zip(placement.rank_of_expert, placement.slot_of_expert, strict=True))
        yield name, {key: torch.stack([of_rank[rank][key][slot] for rank, slot in pairs]) for key in values}
        return
    match = _SLOT.search(name)
    assert match is not None
    for rank, expert in enumerate(placement.expert_of_slot[:, int(match[0])]):
        yield _SLOT.sub(str(expert), name), of_rank[rank]


def _states_of(engine: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
    if not engine.zero_optimization():
        state = engine.optimizer.state[parameter]
        found = {"fp32": parameter, **{key: state[key] for key in ("exp_avg", "exp_avg_sq") if key in state}}
    else:
        found = {"fp32": safe_get_full_fp32_param(parameter)}
        if any("exp_avg" in state for state in engine.optimizer.optimizer.state.values()):
            found |= {key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
    return {key: value.detach().clone().float() for key, value in found.items()}
