"""Report: what an examination found, as a value and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ds_hybrid.doctor.collective import Collective
from ds_hybrid.doctor.facts import HostFacts, NoFacts
from ds_hybrid.doctor.findings import Finding, exit_status
from ds_hybrid.topology.cluster import Cluster
from ds_hybrid.topology.layout import Layout


@dataclass(frozen=True)
class Topology:
    """Where the ranks of a run would be.

    Attributes:
        cluster: with the ranks that a run would start.
        source: who told the links, or the file that describes the machines.
        layout: the groups; None without a ds_config that works for these ranks.
    """

    cluster: Cluster
    source: str
    layout: Layout | None


@dataclass(frozen=True)
class Report:
    """What an examination found.

    Attributes:
        hosts: of the hostfile, in the order of the ranks, each with what it told; without a hostfile this one alone.
        ranks: how many a run would start on each host.
        topology: of these ranks.
        collective: what became of two ranks on this host.
        findings: errors first.
    """

    hosts: Mapping[str, HostFacts | NoFacts]
    ranks: Mapping[str, int]
    topology: Topology
    collective: Collective
    findings: tuple[Finding, ...]

    @property
    def exit_status(self) -> int:
        """Of the command: 0, 1 with warnings, 2 with errors."""
        return exit_status(self.findings)


def to_json(report: Report) -> dict[str, Any]:
    """The report as JSON has it. Every key is always there."""
    cluster, layout = report.topology.cluster, report.topology.layout
    return {
        "exit_status": report.exit_status,
        "findings": [asdict(finding) for finding in report.findings],
        "hosts": [_host(name, answer, report.ranks[name]) for name, answer in report.hosts.items()],
        "topology": {
            "source": report.topology.source,
            "islands": [
                {
                    "host": cluster.hosts[cluster.host_of_rank[island.ranks[0]]].name,
                    "ranks": island.ranks,
                    "joined_by": island.joined_by,
                }
                for island in cluster.islands
            ],
        },
        "groups": _groups(layout) if layout else None,
        "collective": asdict(report.collective),
    }


def _host(name: str, answer: HostFacts | NoFacts, num_ranks: int) -> dict[str, Any]:
    facts = asdict(answer) if isinstance(answer, HostFacts) else None
    return {"name": name, "num_ranks": num_ranks, "facts": facts}


def _groups(layout: Layout) -> dict[str, Any]:
    return {
        "tp": layout.tp_groups,
        "dp": layout.dp_groups,
        "ep": layout.ep_groups,
        "edp": layout.edp_groups,
        "reasons": layout.reasons,
    }
