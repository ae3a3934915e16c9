"""This host, as the kernel shows it to this process: what tells it apart, and its NUMA nodes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys")
"""Where the kernel shows its devices. Tests put a folder in its place."""

PciAddress = tuple[int, int, int]
"""Domain, bus and device."""


def key_of_this_host() -> str:
    """Equal for the processes of one host, and different between hosts, also between those of one name.

    Machines differ in what the kernel drew at boot, and containers of one machine in their namespace of host names.
    """
    namespace = Path("/proc/self/ns/uts")
    inode = namespace.stat().st_ino if namespace.exists() else 0
    return f"{socket.gethostname()} {_read(Path('/proc/sys/kernel/random/boot_id'))} {inode}"


def numa_node_of_device(address: PciAddress, *, sysfs: Path = SYSFS) -> int | None:
    """The NUMA node next to a PCI device; None where the kernel does not know, as in most virtual machines."""
    domain, bus, device = address
    text = _read(sysfs / "bus" / "pci" / "devices" / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "numa_node")
    return int(text) if text.isdecimal() else None  # -1 is unknown


def numa_node_of_this_process(*, sysfs: Path = SYSFS) -> int | None:
    """The NUMA node that has all the CPUs this process may run on; None where several nodes have some."""
    paths = list((sysfs / "devices" / "system" / "node").glob("node[0-9]*/cpulist"))
    if not paths:
        return None
    allowed = os.sched_getaffinity(0)
    touched = [int(path.parent.name.removeprefix("node")) for path in paths if allowed & _cpus(_read(path))]
    return touched[0] if len(touched) == 1 else None


def _cpus(ranges: str) -> set[int]:
    """The CPUs of a list such as "0-3,8"; a node that is only memory has none."""
    ends = (part.split("-") for part in ranges.split(",") if part)
    return {cpu for first_and_last in ends for cpu in range(int(first_and_last[0]), int(first_and_last[-1]) + 1)}


def _read(path: Path) -> str:
    """What the kernel tells, or nothing."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
