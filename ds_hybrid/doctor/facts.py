"""HostFacts: what a host tells of itself, and how it travels from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from pydantic import TypeAdapter, ValidationError

from ds_hybrid.engine.versions import TESTED
from ds_hybrid.observe.nvlink import NvlinkUse
from ds_hybrid.topology.cluster import RankReport

PACKAGES: Final = ("ds_hybrid", *TESTED)

_MARK: Final = "ds_hybrid.doctor facts: "


@dataclass(frozen=True)
class Lock:
    """A lock file of torch's extension builds.

    Attributes:
        path: where it lies.
        identity: differs between files of one path, and is the same where hosts share a file system.
        is_held: a process of this host has it open. Its maker does for as long as it compiles or loads.
    """

    path: str
    identity: str
    is_held: bool


@dataclass(frozen=True)
class HostFacts:
    """What one host tells of itself.

    Attributes:
        host_name: its own name for itself.
        host_key: differs between machines, also between those of one name.
        addresses: what its own name means on it, as text, the first counts; empty when the name is unknown there.
        python: version of the interpreter.
        packages: the version of each of :data:`PACKAGES`, None where it is not installed.
        source_digest: a fingerprint of the package's own files, as checkouts of one version may differ.
        ninja: version of the ninja on PATH, which compiles the extensions; None when there is none.
        compiler: the first line that the C++ compiler says of itself; None when there is none.
        accelerator: DeepSpeed's choice, such as cpu or cuda; None when torch or DeepSpeed does not load.
        backend: what the accelerator communicates with, such as gloo or nccl; None as for ``accelerator``.
        devices: the name of each device that a rank could use; empty on CPUs.
        links_source: who told the links in ``reports``, as in ``topology.probe``; None as for ``accelerator``.
        reports: of a rank on each device; on CPUs one report, which holds for every rank.
        nvlink_use: of its GPUs, whoever runs on them, over a window of ``collect.NVLINK_SECONDS``.
        gloo_interface: the network interface that gloo is told to use, None when it finds its own.
        lock_pattern: a glob pattern for the lock files of extension builds.
        locks: those that are there.
        failure: why torch or DeepSpeed does not load; None when they do.
    """

    host_name: str
    host_key: str
    addresses: tuple[str, ...]
    python: str
    packages: Mapping[str, str | None]
    source_digest: str
    ninja: str | None
    compiler: str | None
    accelerator: str | None
    backend: str | None
    devices: tuple[str, ...]
    links_source: str | None
    reports: tuple[RankReport, ...]
    nvlink_use: NvlinkUse
    gloo_interface: str | None
    lock_pattern: str
    locks: tuple[Lock, ...]
    failure: str | None


@dataclass(frozen=True)
class NoFacts:
    """A host that told nothing, and why: the network did not bring us there, or our question failed there."""

    is_reachable: bool
    reason: str


def to_line(facts: HostFacts) -> str:
    """``facts`` as a line that is found again among what else a login prints."""
    return _MARK + TypeAdapter(HostFacts).dump_json(facts).decode()


def from_output(output: str) -> HostFacts | NoFacts | None:
    """The facts in what a host printed; None when it printed none."""
    lines = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    if not lines:
        return None
    try:
        facts = TypeAdapter(HostFacts).validate_json(lines[-1])
        # Another ds_hybrid looks at other packages.
        return replace(facts, packages=dict.fromkeys(PACKAGES) | dict(facts.packages))
    except ValidationError:
        return NoFacts(is_reachable=True, reason="its ds_hybrid is another one, which answers in another form")
