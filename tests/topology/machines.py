"""Clusters to test with: the machines of data/topo, and hosts written down here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds_hybrid.topology.cluster import Cluster, RankReport
from ds_hybrid.topology.nvidia_smi import LinkTable, parse_topo

DATA = Path(__file__).parent / "data"


def link_table(machine: str) -> LinkTable:
    return parse_topo((DATA / "topo" / f"{machine}.txt").read_text(encoding="utf-8"))


def real_cluster(machine: str, num_hosts: int = 1) -> Cluster:
    """A rank on each GPU of ``num_hosts`` machines of data/topo, which all have the name node."""
    table = link_table(machine)
    return Cluster.from_reports(
        [
            RankReport(f"key {host}", "node", gpu, table.numa_node_of(gpu), table.links_of(gpu))
            for host in range(num_hosts)
            for gpu in range(len(table.gpus))
        ]
    )


def plain_cluster(*ranks_per_host: int) -> Cluster:
    """Hosts of which only the number of ranks is known, as a hostfile tells it."""
    return Cluster.from_reports(
        [RankReport(f"h{host}", f"h{host}") for host, count in enumerate(ranks_per_host) for _ in range(count)]
    )


def numa_cluster(*numa_nodes: Sequence[int | None]) -> Cluster:
    """Hosts of which only the NUMA nodes of the ranks are known."""
    return Cluster.from_reports(
        [RankReport(f"h{host}", f"h{host}", numa_node=node) for host, nodes in enumerate(numa_nodes) for node in nodes]
    )


def linked_host(rows: str, numa_nodes: Sequence[int | None] | None = None) -> Cluster:
    """One host with a rank on each GPU; ``rows`` are the links, a line for each, as nvidia-smi would write them."""
    links = [tuple(row.split()) for row in rows.strip().splitlines()]
    nodes = numa_nodes or [None] * len(links)
    return Cluster.from_reports(
        [RankReport("k", "box", gpu, nodes[gpu], row) for gpu, row in enumerate(links)],
    )
