"""The ranks that a run would start: where they are, and which of them form groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ds_hybrid.config import HybridConfig, gathers_kv
from ds_hybrid.doctor.facts import HostFacts
from ds_hybrid.document import count_at, experts_are_parallel
from ds_hybrid.errors import ConfigError
from ds_hybrid.problems import show
from ds_hybrid.topology.cluster import Cluster, RankReport
from ds_hybrid.topology.layout import Layout, consecutive_groups, plan_layout

_KEY = "ds_hybrid.topology.expert_groups"


def cluster_of(ranks: Mapping[str, int], facts: Mapping[str, HostFacts]) -> Cluster:
    """The cluster of a run, as its ranks would find it.

    Args:
        ranks: the number of ranks of each host, at least 1, in the order of the ranks.
        facts: of the hosts that answered.
    """
    return Cluster.from_reports(
        [_report(name, place, facts.get(name)) for name, num_ranks in ranks.items() for place in range(num_ranks)]
    )


def _report(name: str, place: int, host: HostFacts | None) -> RankReport:
    """Of the rank at ``place`` on a host: it gets the device of that number."""
    if host is None or not host.reports:
        return RankReport(f"{name} told nothing", name)
    # On CPUs one report is that of any rank. A rank too many gets its finding elsewhere, and the last device here.
    return replace(host.reports[min(place, len(host.reports) - 1)], host_name=name)


def sizes_of(document: Mapping[str, Any]) -> tuple[int, int]:
    """The TP size and the EP size of a ds_config; 1 where it is off."""
    tp_size = count_at(document, "tensor_parallel.autotp_size") or 1
    ep_size = count_at(document, "expert_parallel.autoep_size") or 1 if experts_are_parallel(document) else 1
    return tp_size, ep_size


def layout_of(cluster: Cluster, document: Mapping[str, Any], config: HybridConfig, *, num_ranks: int) -> Layout:
    """The groups of a run of ``num_ranks`` ranks with a ds_config.

    With tensor or sequence parallelism DeepSpeed makes the expert groups, from consecutive ranks, whatever the links
    say: ``auto_ep_folding.expected_folding_group_tables`` and ``utils.groups._create_expert_and_data_parallel``.

    Raises:
        ConfigError: the ds_config names groups where DeepSpeed makes them.
        TopologyError: as :func:`ds_hybrid.topology.layout.plan_layout`.
    """
    tp_size, ep_size = sizes_of(document)
    chosen = config.topology.expert_groups
    groups = None if chosen == "auto" else chosen
    maker = _deepspeed_as_maker(document, tp_size)
    if maker is not None:
        if groups is not None:
            raise ConfigError(
                f"{_KEY} = {show(groups)}: not available with tensor or sequence parallelism: DeepSpeed makes the "
                'groups then. Set it to "auto".'
            )
        groups = consecutive_groups(num_ranks, ep_size)
    layout = plan_layout(cluster, world_size=num_ranks, tp_size=tp_size, ep_size=ep_size, expert_groups=groups)
    if maker is None:
        return layout
    return replace(layout, reasons=tuple(reason.replace(f"as {_KEY} says", maker) for reason in layout.reasons))


def _deepspeed_as_maker(document: Mapping[str, Any], tp_size: int) -> str | None:
    """Which part of DeepSpeed makes the expert groups, in words; None where the links decide, or the ds_config."""
    if tp_size > 1:
        return "DeepSpeed's folding: consecutive ranks"
    has_sequences = (count_at(document, "sequence_parallel_size") or 1) > 1 and not gathers_kv(document)
    return "DeepSpeed's own: consecutive ranks" if has_sequences else None
