"""Stand-ins for what a machine with GPUs has: the driver's library, nvidia-smi, sysfs and CUDA."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_hybrid.topology.links import num_nvlinks
from ds_hybrid.topology.nvidia_smi import LinkTable
from ds_hybrid.topology.this_host import PciAddress
from tests.topology.machines import DATA

GPU, NPU, SWITCH, UNKNOWN = 0, 1, 2, 255
"""What NVML calls the far end of an NVLink."""

LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
"""What NVML calls the common ancestor of two GPUs."""


def address_of(gpu: int) -> PciAddress:
    """Where the stand-ins have a GPU."""
    return 0, 0x1A + gpu, 0


def show(address: PciAddress) -> str:
    return ":".join(f"{part:x}" for part in address)


def compile_nvml(folder: Path) -> None:
    """Put a stand-in for the driver's library into ``folder``."""
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("nvidia-ml-py is not installed: pip install 'ds_hybrid[nvml]'")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (gcc or cc) on PATH")
    source = DATA / "stand_in_nvml.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)


def gpu_line(gpu: int, *, code: int = 0) -> str:
    return f"gpu {show(address_of(gpu))} {code}"


def link_line(
    gpu: int, link: int, *, up: int = 1, code: int = 0, kind: int = SWITCH, end: PciAddress = (0, 0xF0, 0)
) -> str:
    return f"link {gpu} {link} {up} {code} {kind} {show(end)}"


def nvml_lines(table: LinkTable, *, has_switches: bool) -> Iterator[str]:
    """The machine of a table, for the stand-in library: its NVLinks lead to switches, or straight to GPUs."""
    for gpu in range(len(table.gpus)):
        yield gpu_line(gpu)
        counts = [num_nvlinks(kind) for kind in table.links_of(gpu)]
        if has_switches:
            yield from (link_line(gpu, link) for link in range(max(counts)))
        else:
            ends = [address_of(other) for other, count in enumerate(counts) for _ in range(count)]
            yield from (link_line(gpu, link, kind=GPU, end=end) for link, end in enumerate(ends))
        # Of GPUs with NVLinks the table does not tell the ancestor.
        yield from (f"level {gpu} {other} 0 {LEVELS.get(table.links_of(gpu)[other], 40)}" for other in range(gpu))


def write_nvidia_smi(folder: Path, topo: str, gpus: Mapping[int, PciAddress]) -> None:
    """Put a stand-in for nvidia-smi into ``folder``; ``gpus`` are the addresses that it lists, by index."""
    folder.mkdir(exist_ok=True)
    (folder / "topo.txt").write_text(topo, encoding="utf-8")
    lines = (f"{gpu}, {domain:08X}:{bus:02X}:{device:02X}.0" for gpu, (domain, bus, device) in gpus.items())
    (folder / "gpus.txt").write_text("\n".join([*lines, ""]))
    script = folder / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f'"topo -m") exec /bin/cat "{folder}/topo.txt" ;;\n'
        f'"--query-gpu=index,pci.bus_id --format=csv,noheader") exec /bin/cat "{folder}/gpus.txt" ;;\n'
        "*) exit 2 ;;\n"
        "esac\n"
    )
    script.chmod(0o755)


def write_sysfs(
    root: Path, *, cpus_of_node: Mapping[int, str], node_of_gpu: Mapping[PciAddress, int | str] | None = None
) -> Path:
    """Put a stand-in for sysfs into ``root``."""
    for node, cpus in cpus_of_node.items():
        folder = root / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for (domain, bus, device), gpu_node in (node_of_gpu or {}).items():
        folder = root / "bus" / "pci" / "devices" / f"{domain:04x}:{bus:02x}:{device:02x}.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{gpu_node}\n")
    return root


def put_on_gpu(patch: pytest.MonkeyPatch, current: int, *, in_cuda_order: Sequence[PciAddress]) -> None:
    """Let this process run on CUDA device ``current`` of those that CUDA_VISIBLE_DEVICES leaves, as CUDA numbers them.

    Args:
        in_cuda_order: the GPUs of the host; CUDA's order need not be that of nvidia-smi.
    """
    import torch
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    from ds_hybrid.topology import probe

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    indices = range(len(in_cuda_order)) if chosen is None else [int(index) for index in chosen.split(",")]
    domain, bus, device = [in_cuda_order[index] for index in indices][current]
    properties = SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=device)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "current_device", lambda: current)
    patch.setattr(torch.cuda, "get_device_properties", {current: properties}.__getitem__)
    patch.setattr(probe, "get_accelerator", CUDA_Accelerator)


def without_nvml(patch: pytest.MonkeyPatch) -> None:
    """As on a host where nvidia-ml-py is not installed."""
    patch.setitem(sys.modules, "pynvml", None)
