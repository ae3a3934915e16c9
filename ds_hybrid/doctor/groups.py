"""The ranks that a run would start: where they are, and which of them form groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ds_hybrid.config import HybridConfig
from ds_hybrid.doctor.facts import HostFacts
from ds_hybrid.document import count_at, experts_are_parallel
from ds_hybrid.topology.cluster import Cluster, RankReport
from ds_hybrid.topology.layout import Layout, plan_layout


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

    Raises:
        TopologyError: as :func:`ds_hybrid.topology.layout.plan_layout`.
    """
    tp_size, ep_size = sizes_of(document)
    chosen = config.topology.expert_groups
    return plan_layout(
        cluster,
        world_size=num_ranks,
        tp_size=tp_size,
        ep_size=ep_size,
        expert_groups=None if chosen == "auto" else chosen,
    )
