"""Which ranks form the expert groups of a model: those that the links put together, or that the ds_config names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_hybrid.config import HybridConfig, gathers_kv
from ds_hybrid.document import count_at, experts_are_parallel
from ds_hybrid.errors import ConfigError
from ds_hybrid.moe.layer import MoE
from ds_hybrid.problems import show
from ds_hybrid.topology.cluster import Cluster
from ds_hybrid.topology.layout import Layout, consecutive_groups, plan_layout

_KEY = "ds_hybrid.topology.expert_groups"


@dataclass(frozen=True)
class ExpertLayouts:
    """What is decided.

    Attributes:
        ours: a layout for each size of groups; none where DeepSpeed makes the groups.
        reasons, warnings: for people, one line each.
    """

    ours: tuple[Layout, ...] = ()
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def expert_group_sizes(model: nn.Module, document: Mapping[str, Any]) -> list[int]:
    """The sizes above 1 of the model's expert-parallel groups, ascending."""
    sizes = {layer.ep_size for layer in model.modules() if isinstance(layer, MoE)}
    if experts_are_parallel(document):
        sizes.add(count_at(document, "expert_parallel.autoep_size") or 1)
    return sorted(sizes - {1})


def expert_layouts(
    sizes: Sequence[int],
    document: Mapping[str, Any],
    config: HybridConfig,
    cluster: Cluster,
    *,
    deepspeeds_groups: bool = False,
) -> ExpertLayouts:
    """The expert groups of a run.

    With AutoTP, DeepSpeed's folding makes the groups from consecutive ranks and refuses all others
    (``deepspeed.utils.groups`` calls ``auto_ep_folding.assert_group_matches_spec``), whatever the links say.

    Args:
        sizes: see :func:`expert_group_sizes`.
        document: the whole ds_config.
        deepspeeds_groups: an mpu or a mesh is there, so DeepSpeed makes the groups. It does with Ulysses too; where
            ds_hybrid shares sequences out, expert groups lie over all ranks, whatever sequences they hold parts of.

    Raises:
        ConfigError: the ds_config names groups, and the model has expert groups of several sizes, or DeepSpeed makes
            them.
        TopologyError: a size does not divide the number of ranks, or the named groups do not fit.
    """
    tp_size = count_at(document, "tensor_parallel.autotp_size") or 1
    groups = None if config.topology.expert_groups == "auto" else config.topology.expert_groups
    has_sequences = (count_at(document, "sequence_parallel_size") or 1) > 1 and not gathers_kv(document)
    if deepspeeds_groups or tp_size > 1 or has_sequences:
        if groups is not None:
            raise ConfigError(
                f"{_KEY} = {show(groups)}: not available with tensor or sequence parallelism, an mpu or a mesh: "
                'DeepSpeed makes the groups then. Set it to "auto".'
            )
        return _of_folding(sizes, tp_size, cluster) if tp_size > 1 else ExpertLayouts()
    if groups is not None and len(sizes) != 1:
        raise ConfigError(
            f"{_KEY} = {show(groups)}: needs experts in groups of one size above 1, the model has "
            f'{", ".join(map(str, sizes)) or "none"}. Set it to "auto".'
        )
    layouts = tuple(
        plan_layout(cluster, world_size=cluster.num_ranks, ep_size=size, expert_groups=groups) for size in sizes
    )
    return ExpertLayouts(
        layouts,
        tuple(reason for layout in layouts for reason in layout.reasons if reason.startswith("EP")),
        tuple(warning for layout in layouts for warning in layout.warnings),
    )


def _of_folding(sizes: Sequence[int], tp_size: int, cluster: Cluster) -> ExpertLayouts:
    """Nothing to decide; what the links would rather have is a warning."""
    warnings: list[str] = []
    for size in sizes:
        layout = plan_layout(cluster, world_size=cluster.num_ranks, tp_size=tp_size, ep_size=size, expert_axis="tp")
        warnings += layout.warnings
        if layout.ep_groups != consecutive_groups(cluster.num_ranks, size):
            warnings.append(
                f"expert_parallel.autoep_size = {size}: the links put {show(layout.ep_groups)} together, and "
                "DeepSpeed's folding takes consecutive ranks. Give the ranks their devices in another order."
            )
    return ExpertLayouts(warnings=tuple(warnings))
