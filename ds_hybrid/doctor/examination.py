"""The whole examination: asks the hosts, lets the checks judge, starts the collective, and draws up the Report."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from ds_hybrid.config import check, find_warnings
from ds_hybrid.doctor.checks import check_facts, check_ranks, check_silence
from ds_hybrid.doctor.collective import Collective, run_collective
from ds_hybrid.doctor.env_files import read_env_files
from ds_hybrid.doctor.facts import HostFacts, NoFacts
from ds_hybrid.doctor.findings import Finding, Severity
from ds_hybrid.doctor.groups import cluster_of, layout_of
from ds_hybrid.doctor.hosts import SSH, Answers, ask_hosts
from ds_hybrid.doctor.report import Report, Topology
from ds_hybrid.document import read_document
from ds_hybrid.errors import ConfigError, TopologyError
from ds_hybrid.topology.cluster import Cluster
from ds_hybrid.topology.description import read_cluster
from ds_hybrid.topology.hostfile import read_hostfile

DEFAULT_HOSTFILE: Final = Path("/job/hostfile")
"""What DeepSpeed reads when it is told of no other, if it exists."""


def examine(
    *,
    hostfile: Path | None = None,
    num_gpus: int | None = None,
    config: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Report:
    """Examine this host, or the hosts of a hostfile.

    Args:
        hostfile: None takes DEFAULT_HOSTFILE where it exists, as DeepSpeed does; /dev/null is none.
        num_gpus: ranks of each host, in place of the slots. Without both: one for each device, at least one.
        config: a ds_config, whose groups are laid out.
        tell: gets a line before each part that takes its time.
    """
    slots, hostfile_findings = _read_slots(hostfile)
    env_files = read_env_files(os.environ, severity="error" if len(slots) > 1 else "warning")
    tell(f"asking {', '.join(slots) or 'this host'}")
    environment = env_files.here(os.environ) if slots else os.environ
    answers = ask_hosts(list(slots), environment=environment, exports=env_files.exports(os.environ))
    hosts = answers.hosts or {_own_name(answers): answers.here}
    facts = {name: answer for name, answer in hosts.items() if isinstance(answer, HostFacts)}
    silent = {name: answer for name, answer in hosts.items() if isinstance(answer, NoFacts)}
    ranks = {name: num_gpus or slots.get(name) or _num_devices(hosts[name]) for name in hosts}
    topology, config_findings = _lay_out(cluster_of(ranks, facts), facts, config)
    collective = _collective(answers, environment, tell)
    findings = [
        *hostfile_findings,
        *env_files.findings,
        *_launcher_findings(slots),
        *check_silence(silent, login=shlex.join(SSH), python=sys.executable),
        *check_facts(facts, num_hosts=len(hosts)),
        *check_ranks(facts, slots=slots, num_gpus=num_gpus),
        *config_findings,
        *_findings("warning", "topology", topology.cluster.warnings),
        *_findings("warning", "groups", topology.layout.warnings if topology.layout else ()),
        *_collective_findings(collective),
    ]
    return Report(
        hosts=hosts,
        ranks=ranks,
        topology=topology,
        collective=collective,
        findings=tuple(sorted(findings, key=lambda finding: finding.severity)),
    )


def _read_slots(hostfile: Path | None) -> tuple[dict[str, int], list[Finding]]:
    """The ranks of each host that the hostfile gives; none when there is none, or none that can be used."""
    path = hostfile or DEFAULT_HOSTFILE
    if str(path) == os.devnull or (hostfile is None and not path.is_file()):
        return {}, []
    if not path.is_file():
        rule = "no such file, and DeepSpeed would go on with this host alone. Check the path."
        return {}, [Finding("error", "hostfile", f"{path}: {rule}")]
    try:
        read = read_hostfile(path)
    except TopologyError as error:
        return {}, _findings("error", "hostfile", str(error).splitlines())
    slots = {host.name: host.num_slots for host in read.hosts}
    return slots, _findings("warning", "hostfile", read.warnings)


def _lay_out(cluster: Cluster, facts: Mapping[str, HostFacts], config: Path | None) -> tuple[Topology, list[Finding]]:
    """The topology with its groups, as far as the ds_config lets it come."""
    sources = dict.fromkeys(host.links_source for host in facts.values() if host.links_source is not None)
    topology = Topology(cluster, "; ".join(sources) or "nobody", layout=None)
    if config is None:
        return topology, []
    findings: list[Finding] = []
    try:
        document = read_document(config)
        findings += _findings("warning", "config", find_warnings(document, name=str(config)))
        checked = check(document, name=str(config), world_size=cluster.num_ranks)
        source = checked.topology.source
        if source != "auto":
            topology = Topology(read_cluster(source), source, layout=None)
        topology = replace(topology, layout=layout_of(topology.cluster, document, checked, num_ranks=cluster.num_ranks))
    except ConfigError as error:
        findings += _findings("error", "config", error.problems)
    except TopologyError as error:
        findings += _findings("error", "topology", str(error).splitlines())
    return topology, findings


def _collective(answers: Answers, environment: Mapping[str, str], tell: Callable[[str], None]) -> Collective:
    here = answers.here
    if isinstance(here, NoFacts):
        return Collective("skipped", f"this host cannot be asked: {here.reason}")
    keys = {answer.host_key for answer in answers.hosts.values() if isinstance(answer, HostFacts)}
    if answers.hosts and here.host_key not in keys:
        return Collective("skipped", "this host is none of those that answered")
    tell("starting two ranks on this host; DeepSpeed may first compile an op")
    return run_collective(here, environment)


def _collective_findings(collective: Collective) -> list[Finding]:
    if collective.result != "failed":
        return []
    return [Finding("error", "collective", f"collective: {collective.detail}.")]


def _launcher_findings(slots: Mapping[str, int]) -> list[Finding]:
    if len(slots) < 2 or shutil.which("pdsh") is not None:
        return []
    rule = "not on PATH here, and DeepSpeed starts several hosts with it. Install it, or give another --launcher."
    return [Finding("warning", "launcher", f"pdsh: {rule}")]


def _findings(severity: Severity, check: str, messages: Iterable[str]) -> list[Finding]:
    return [Finding(severity, check, message) for message in messages]


def _own_name(answers: Answers) -> str:
    return answers.here.host_name if isinstance(answers.here, HostFacts) else socket.gethostname()


def _num_devices(answer: HostFacts | NoFacts) -> int:
    return max(1, len(answer.devices)) if isinstance(answer, HostFacts) else 1
