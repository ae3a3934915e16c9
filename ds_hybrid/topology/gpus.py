"""The GPUs of this host, all of them, whatever CUDA_VISIBLE_DEVICES says: from NVML where it loads, else nvidia-smi.

Imports neither torch nor deepspeed, and starts no CUDA.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ds_hybrid.errors import TopologyError
from ds_hybrid.topology.links import PCIE_KINDS, SELF, UNKNOWN
from ds_hybrid.topology.nvidia_smi import parse_topo
from ds_hybrid.topology.this_host import SYSFS, PciAddress, numa_node_of_device


@dataclass(frozen=True)
class HostGpus:
    """The G GPUs of this host in nvidia-smi's numbering.

    Attributes:
        source: who told: "NVML", "nvidia-smi" or "none", and in brackets why those before it did not.
        addresses: [G]; None for a GPU that does not answer.
        numa_nodes: [G]; None where unknown.
        links: [G, G] kinds of link, in nvidia-smi's words; "HOST" where unknown.
    """

    source: str
    addresses: tuple[PciAddress | None, ...] = ()
    numa_nodes: tuple[int | None, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()


def read_gpus(*, sysfs: Path = SYSFS) -> HostGpus:
    """Ask NVML, then nvidia-smi. What neither of them tells is left out; nothing is raised."""
    by_nvml = _by_nvml(sysfs)
    if isinstance(by_nvml, HostGpus):
        return by_nvml
    by_nvidia_smi = _by_nvidia_smi(sysfs, f"NVML: {by_nvml}")
    if isinstance(by_nvidia_smi, HostGpus):
        return by_nvidia_smi
    return HostGpus(f"none (NVML: {by_nvml}; nvidia-smi: {by_nvidia_smi})")


def _by_nvml(sysfs: Path) -> HostGpus | str:
    """What NVML tells, or why it does not.

    A broken binding raises what it likes, and a rank that let it through would leave the others in a collective.
    """
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed"
    except Exception as error:
        return _in_words(error)
    if not hasattr(pynvml, "nvmlDeviceGetNvLinkRemoteDeviceType"):
        return "the installed pynvml is too old"
    try:
        pynvml.nvmlInit()
        try:
            gpus = [_nvml_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
            addresses = tuple(gpu.address if gpu else None for gpu in gpus)
            nvlinks = [_num_nvlinks(pynvml, gpu.handle, addresses) if gpu else _NVLinks() for gpu in gpus]
            places = range(len(gpus))
            links = tuple(tuple(_nvml_link(pynvml, gpus, nvlinks, one, other) for other in places) for one in places)
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:
        return str(error) if isinstance(error, getattr(pynvml, "NVMLError", ())) else _in_words(error)
    if not gpus:
        return "sees no GPU"
    return HostGpus("NVML", addresses, tuple(_numa_node(address, sysfs) for address in addresses), links)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class _NvmlGpu:
    handle: Any
    address: PciAddress


def _nvml_gpu(pynvml: Any, index: int) -> _NvmlGpu | None:
    """A GPU, or None for one that has fallen off the bus."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return _NvmlGpu(handle, _nvml_address(pynvml.nvmlDeviceGetPciInfo(handle)))
    except pynvml.NVMLError:
        return None


def _nvml_address(info: Any) -> PciAddress:
    return info.domain, info.bus, info.device


_SWITCH: Final = "NVSwitch"
_NVLinks = Counter[PciAddress | str]  # how many NVLinks lead to each GPU, and how many to switches


def _num_nvlinks(pynvml: Any, handle: Any, addresses: Sequence[PciAddress | None]) -> _NVLinks:
    ends = (_far_end(pynvml, handle, link, addresses) for link in range(pynvml.NVML_NVLINK_MAX_LINKS))
    return Counter(end for end in ends if end is not None)


def _far_end(pynvml: Any, handle: Any, link: int, addresses: Sequence[PciAddress | None]) -> PciAddress | str | None:
    """Where an NVLink leads; None for one that is down, or that the GPU does not have."""
    try:
        if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
            return None
        kind = _far_kind(pynvml, handle, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return _SWITCH
        address = _nvml_address(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
    except pynvml.NVMLError:
        return None
    # A virtual machine may have the GPUs and not the switches; NCCL takes an end it cannot see for a switch, too.
    hidden = kind == pynvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN and address not in addresses
    return _SWITCH if hidden else address


def _far_kind(pynvml: Any, handle: Any, link: int) -> int:
    try:
        return int(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))
    except pynvml.NVMLError:  # drivers before 470 do not have the function
        return int(pynvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN)


def _nvml_link(pynvml: Any, gpus: Sequence[_NvmlGpu | None], nvlinks: Sequence[_NVLinks], one: int, other: int) -> str:
    if one == other:
        return SELF
    here, there = gpus[one], gpus[other]
    if here is None or there is None:
        return UNKNOWN
    # Every GPU on switches reaches every other one over all of its links.
    count = nvlinks[one][there.address] or min(nvlinks[one][_SWITCH], nvlinks[other][_SWITCH])
    if count:
        return f"NV{count}"
    try:
        ancestor = pynvml.nvmlDeviceGetTopologyCommonAncestor(here.handle, there.handle)
    except pynvml.NVMLError:
        return UNKNOWN
    levels = (
        pynvml.NVML_TOPOLOGY_SINGLE,
        pynvml.NVML_TOPOLOGY_MULTIPLE,
        pynvml.NVML_TOPOLOGY_HOSTBRIDGE,
        pynvml.NVML_TOPOLOGY_NODE,
        pynvml.NVML_TOPOLOGY_SYSTEM,
    )
    words = {pynvml.NVML_TOPOLOGY_INTERNAL: PCIE_KINDS[0], **dict(zip(levels, PCIE_KINDS, strict=True))}
    return words.get(ancestor, UNKNOWN)


_GPU_LINE = re.compile(r"([0-9]+), ([0-9A-F]+):([0-9A-F]+):([0-9A-F]+)\.[0-9A-F]+", re.ASCII | re.IGNORECASE)


def _by_nvidia_smi(sysfs: Path, before: str) -> HostGpus | str:
    """What nvidia-smi tells, or why it does not; ``before`` is why it was asked."""
    try:
        table = parse_topo(_nvidia_smi("topo", "-m"), name="nvidia-smi topo -m")
        list_of_gpus = _nvidia_smi("--query-gpu=index,pci.bus_id", "--format=csv,noheader")
    except (OSError, subprocess.SubprocessError, TopologyError) as error:
        return str(error)
    matches = [_GPU_LINE.fullmatch(line.strip()) for line in list_of_gpus.splitlines()]
    found = {
        f"GPU{int(match[1])}": (int(match[2], 16), int(match[3], 16), int(match[4], 16)) for match in matches if match
    }
    addresses = tuple(found.get(name) for name in table.gpus)
    numa_nodes = [_numa_node(address, sysfs) for address in addresses]
    return HostGpus(
        f"nvidia-smi ({before})",
        addresses,
        tuple(table.numa_node_of(gpu) if node is None else node for gpu, node in enumerate(numa_nodes)),
        tuple(table.links_of(gpu) for gpu in range(len(table.gpus))),
    )


def _nvidia_smi(*arguments: str) -> str:
    # Over a broken driver it may hang.
    done = subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, errors="replace", timeout=60, check=True
    )
    return done.stdout


def _numa_node(address: PciAddress | None, sysfs: Path) -> int | None:
    return None if address is None else numa_node_of_device(address, sysfs=sysfs)
