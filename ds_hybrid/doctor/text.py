"""The Report for people: plain aligned text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_hybrid.doctor.facts import HostFacts
from ds_hybrid.doctor.report import Report
from ds_hybrid.observe.nvlink import GpuUse, NotAvailable
from ds_hybrid.topology.layout import Layout

_Cells = Sequence[str]

_GIGABYTE = 1e9

_VERSIONS: tuple[tuple[str, Callable[[HostFacts], str | None]], ...] = (
    ("python", lambda host: host.python),
    ("torch", lambda host: host.packages["torch"]),
    ("deepspeed", lambda host: host.packages["deepspeed"]),
    ("ds_hybrid", lambda host: host.packages["ds_hybrid"]),
    ("transformers", lambda host: host.packages["transformers"]),
    ("accelerate", lambda host: host.packages["accelerate"]),
    ("peft", lambda host: host.packages["peft"]),
    ("ninja", lambda host: host.ninja),
    ("compiler", lambda host: host.compiler),
)


def to_text(report: Report) -> str:
    """The whole report, one section after the other, the findings last."""
    layout = report.topology.layout
    sections = [
        _section("versions", _versions(report)),
        _section("hosts", _hosts(report)),
        _section(f"topology, links: {report.topology.source}", _islands(report)),
        *([_section("groups", _groups(layout))] if layout else []),
        _section("NVLink use", _nvlink_use(report)),
        _section("collective", [[report.collective.result, report.collective.detail]]),
        _section("findings", [[one.severity, one.message] for one in report.findings] or [["none"]]),
    ]
    return "\n\n".join(sections)


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers with their runs drawn together: ``0-3,6``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _section(title: str, rows: Sequence[_Cells]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def _versions(report: Report) -> list[_Cells]:
    """A row for each version, and for each other one that hosts have, with their names where they differ."""
    facts = {name: answer for name, answer in report.hosts.items() if isinstance(answer, HostFacts)}
    rows: list[_Cells] = []
    for what, value_of in _VERSIONS:
        hosts_of: dict[str, list[str]] = {}
        for name, host in facts.items():
            hosts_of.setdefault(value_of(host) or "none", []).append(name)
        for value, names in hosts_of.items():
            rows.append([what, value, ", ".join(names) if len(hosts_of) > 1 else ""])
    return rows or [["unknown"]]


def _hosts(report: Report) -> list[_Cells]:
    rows: list[_Cells] = [["host", "own name", "address", "ranks", "accelerator", "devices"]]
    for name, answer in report.hosts.items():
        num_ranks = str(report.ranks[name])
        if isinstance(answer, HostFacts):
            own = [answer.host_name, (answer.addresses or ("?",))[0]]
            rows.append([name, *own, num_ranks, answer.accelerator or "?", _counted(answer.devices)])
        else:
            rows.append([name, "?", "?", num_ranks, "?", "?"])
    return rows


def _counted(devices: Sequence[str]) -> str:
    """``8 x NVIDIA H200 (140 GiB)``; "" on CPUs."""
    return ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))


def _islands(report: Report) -> list[_Cells]:
    cluster, layout = report.topology.cluster, report.topology.layout
    rows: list[_Cells] = [["island", "host", "joined by", "ranks", "devices", "NUMA", "EP groups"]]
    for number, island in enumerate(cluster.islands):
        host = cluster.hosts[cluster.host_of_rank[island.ranks[0]]]
        places = [host.ranks.index(rank) for rank in island.ranks]
        devices = [device for place in places if (device := host.devices[place]) is not None]
        nodes = sorted({node for place in places if (node := host.numa_nodes[place]) is not None})
        groups = [at for at, group in enumerate(layout.ep_groups if layout else ()) if set(group) & set(island.ranks)]
        rows.append(
            [
                str(number),
                host.name,
                island.joined_by,
                spans(island.ranks),
                spans(sorted(devices)) or "-",
                spans(nodes) or "?",
                spans(groups),
            ]
        )
    return rows if layout else [row[:-1] for row in rows]


def _groups(layout: Layout) -> list[_Cells]:
    """Why the groups are these, and the ranks of each EP group, by the number that the islands name it by."""
    rows: list[_Cells] = [reason.split(": ", maxsplit=1) for reason in layout.reasons]
    if len(layout.ep_groups[0]) > 1:
        rows += [[f"EP {number}", f"ranks {spans(group)}"] for number, group in enumerate(layout.ep_groups)]
    return rows


def _nvlink_use(report: Report) -> list[_Cells]:
    """A row for each thing to say, with the GPUs that it is said of."""
    rows: list[_Cells] = []
    for name, answer in report.hosts.items():
        if not isinstance(answer, HostFacts):
            continue
        if isinstance(answer.nvlink_use, NotAvailable):
            rows.append([name, "-", f"not available: {answer.nvlink_use.reason}"])
            continue
        gpus_of: dict[str, list[int]] = {}
        for gpu, use in answer.nvlink_use.items():
            said = _one_use(use) if isinstance(use, GpuUse) else f"not available: {use.reason}"
            gpus_of.setdefault(said, []).append(gpu)
        rows += [[name, f"GPU {spans(gpus)}", said] for said, gpus in gpus_of.items()]
    return rows or [["unknown"]]


def _one_use(use: GpuUse) -> str:
    window = "" if use.seconds is None else f" over {use.seconds:.1f} s"
    part = "" if use.fraction is None else f", {use.fraction:.0%} of its links' speed"
    sent, received = use.sent / _GIGABYTE, use.received / _GIGABYTE
    return f"{sent:.2f} GB/s sent, {received:.2f} GB/s received{window}{part}"
