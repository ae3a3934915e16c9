"""What a run is, as the first of its records."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_hybrid.moe.kinds import MoELayer
from ds_hybrid.observe.compose import slots, without_secrets
from ds_hybrid.observe.events import ExpertGroups, LayerFacts, RunRecord
from ds_hybrid.rebalance.migrate import ExpertGrid
from ds_hybrid.topology.cluster import Cluster

_PACKAGES = ("ds_hybrid", "deepspeed", "torch", "transformers", "numpy")


def run_record(
    document: Mapping[str, Any],
    module: nn.Module,
    layers: Sequence[MoELayer],
    cluster: Cluster,
    ep_groups: Mapping[int, Sequence[Sequence[int]]],
    grids: Mapping[int, ExpertGrid],
    *,
    tp_size: int,
    no_nvlink: str | None,
) -> RunRecord:
    """The record of a run's start.

    Args:
        document: the whole ds_config.
        ep_groups, grids: by the number of expert-parallel ranks.
        no_nvlink: why the use of NVLinks is not measured; None where it is.
    """
    return RunRecord(
        time=time.time(),
        step=0,
        ds_config=without_secrets(document),
        versions={"python": platform.python_version(), **_versions()},
        model=type(module).__name__,
        device=_device_name(),
        world_size=dist.get_world_size(),
        tp_size=tp_size,
        node_of_rank=tuple(cluster.hosts[host].name for host in cluster.host_of_rank),
        expert_groups=tuple(
            ExpertGroups(
                ep_size=size,
                ep_groups=tuple(map(tuple, groups)),
                edp_groups=tuple(zip(*grids[size].ranks, strict=True)),
            )
            for size, groups in ep_groups.items()
        ),
        layers=tuple(_facts_of(layer) for layer in layers),
        nvlink=no_nvlink,
    )


def _facts_of(layer: MoELayer) -> LayerFacts:
    return LayerFacts(
        name=layer.layer_name,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        hidden_size=layer.hidden_size,
        ep_size=layer.ep_size,
        mode=layer.dispatcher.mode,
        candidates=layer.switch.candidates,
        expert_of_slot=slots(layer.placement),
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _device_name() -> str:
    name = str(get_accelerator().device_name())
    return torch.cuda.get_device_name() if name == "cuda" else name
