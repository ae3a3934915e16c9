"""Which ranks form the expert groups of a model: those that the links put together, or that the ds_config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ds_hybrid.config import HybridConfig
from ds_hybrid.document import count_at, experts_are_parallel
from ds_hybrid.errors import ConfigError
from ds_hybrid.moe.layer import MoE
from ds_hybrid.topology.cluster import Cluster
from ds_hybrid.topology.layout import Layout, plan_layout

_KEY = "ds_hybrid.topology.expert_groups"


def expert_layouts(
    model: nn.Module, document: Mapping[str, Any], config: HybridConfig, cluster: Cluster, *, data_parallel: bool
) -> list[Layout]:
    """A layout for each size above 1 that expert groups of the model have.

    Args:
        document: the whole ds_config.
        data_parallel: whether all ranks are data-parallel ones. Where they are not, DeepSpeed makes the groups.

    Raises:
        ConfigError: the ds_config names groups, and the model has expert groups of several sizes, or ranks that are
            not data-parallel.
        TopologyError: a size does not divide the number of ranks, or the named groups do not fit.
    """
    sizes = {layer.ep_size for layer in model.modules() if isinstance(layer, MoE)}
    if experts_are_parallel(document):
        sizes.add(count_at(document, "expert_parallel.autoep_size") or 1)
    sizes -= {1}
    groups = None if config.topology.expert_groups == "auto" else config.topology.expert_groups
    if not data_parallel:
        if groups is not None:
            raise ConfigError(
                f"{_KEY}: not available with tensor or sequence parallelism, an mpu or a mesh: DeepSpeed makes the "
                'groups then. Set it to "auto".'
            )
        return []
    if groups is not None and len(sizes) != 1:
        raise ConfigError(
            f"{_KEY}: needs experts in groups of one size above 1, the model has "
            f'{", ".join(map(str, sorted(sizes))) or "none"}. Set it to "auto".'
        )
    return [
        plan_layout(cluster, world_size=cluster.num_ranks, ep_size=size, expert_groups=groups) for size in sorted(sizes)
    ]
