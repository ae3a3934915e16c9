"""The GPUs of this host: the real binding of NVML over a stand-in library, and a stand-in for nvidia-smi."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ds_hybrid.topology.gpus import HostGpus, read_gpus
from tests.topology.machines import DATA, link_table
from tests.topology.stand_ins import (
    GPU,
    LEVELS,
    NPU,
    SWITCH,
    UNKNOWN,
    address_of,
    compile_nvml,
    gpu_line,
    link_line,
    nvml_lines,
    without_nvml,
    write_nvidia_smi,
    write_sysfs,
)

_TABLE = (DATA / "topo" / "a100_pcie_nvlink_bridge_pairs.txt").read_text()
_LINKS = tuple(link_table("a100_pcie_nvlink_bridge_pairs").links_of(gpu) for gpu in range(4))
_LOST, _DRIVER_NOT_LOADED, _FUNCTION_NOT_FOUND = 15, 9, 13

# NVML.

_READ = """
import pathlib, sys
import pynvml
from ds_hybrid.topology.gpus import read_gpus
print(repr(read_gpus(sysfs=pathlib.Path(sys.argv[1]))))
assert "torch" not in sys.modules and "deepspeed" not in sys.modules
try:
    pynvml.nvmlDeviceGetCount()
except pynvml.NVMLError_Uninitialized:
    pass
else:
    raise AssertionError("NVML is still open")
"""

Reader = Callable[..., HostGpus]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled stand-in."""
    folder = tmp_path_factory.mktemp("nvml")
    compile_nvml(folder)
    return folder


def _run(library: Path, machine: Path, sysfs: Path) -> HostGpus:
    """What a fresh interpreter reads, without nvidia-smi."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "STAND_IN_NVML": str(machine), "PATH": str(library)}
    done = subprocess.run([sys.executable, "-c", _READ, sysfs], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    gpus = eval(done.stdout)
    assert isinstance(gpus, HostGpus)
    return gpus


@pytest.fixture
def read(library: Path, tmp_path: Path) -> Reader:
    def reader(*lines: str) -> HostGpus:
        machine = tmp_path / "machine.txt"
        machine.write_text("\n".join([*lines, ""]))
        return _run(library, machine, tmp_path)

    return reader


@pytest.mark.parametrize(
    ("machine", "has_switches"),
    [
        ("hgx_h100_8gpu", True),
        ("dgx2_16gpu_nv6", True),
        ("b200_one_gpu_lost_nvlink", True),
        ("a100_pcie_nvlink_bridge_pairs", False),
        ("v100_8gpu_cube_mesh", False),
        ("h100_4gpu_nv6_interleaved_cpus", False),
        ("pcie_6gpu_ansi", False),
        ("rtx4090_8gpu_no_nvlink", False),
        ("two_gpu_phb", False),
        ("single_gpu", False),
    ],
)
def test_nvml_tells_the_table_of_nvidia_smi(machine: str, has_switches: bool, read: Reader) -> None:
    table = link_table(machine)
    indices = range(len(table.gpus))
    assert read(*nvml_lines(table, has_switches=has_switches)) == HostGpus(
        "NVML",
        tuple(address_of(gpu) for gpu in indices),
        (None,) * len(table.gpus),
        tuple(table.links_of(gpu) for gpu in indices),
    )


_HIDDEN = (0xFFFFFFFF, 0xFF, 0x1F)


@pytest.mark.parametrize(
    ("ends", "kind"),
    [
        ([{"kind": SWITCH}] * 3, "NV3"),
        ([{"kind": SWITCH}, {"kind": SWITCH, "up": 0}, {"kind": SWITCH}], "NV2"),
        ([{"kind": SWITCH, "up": 0}], "PXB"),
        ([{"kind": UNKNOWN, "end": _HIDDEN}] * 3, "NV3"),  # the switches of a virtual machine
        ([{"code": _FUNCTION_NOT_FOUND, "end": _HIDDEN}] * 3, "NV3"),
        ([{"kind": GPU, "end": _HIDDEN}] * 3, "PXB"),  # a GPU that this container does not have
        ([{"kind": NPU, "end": _HIDDEN}] * 3, "PXB"),
        ([{"kind": GPU}] * 2, "NV2"),
        ([{"kind": UNKNOWN}] * 2, "NV2"),
        ([{"code": _FUNCTION_NOT_FOUND}] * 2, "NV2"),  # a driver before 470
        ([{"kind": GPU}, {"kind": GPU, "up": 0}], "NV1"),
    ],
)
def test_where_nvlinks_lead(ends: list[dict[str, object]], kind: str, read: Reader) -> None:
    """Two GPUs with the same NVLinks, each to the other one if nothing else is said."""
    lines = [
        link_line(gpu, link, **{"end": address_of(1 - gpu), **end}) for gpu in (0, 1) for link, end in enumerate(ends)
    ]
    assert read(gpu_line(0), gpu_line(1), *lines, f"level 0 1 0 {LEVELS['PXB']}").links == (("X", kind), (kind, "X"))


def test_gpus_on_switches_share_the_links_of_the_one_that_has_fewer(read: Reader) -> None:
    lines = [link_line(gpu, link) for gpu, count in enumerate((18, 16, 0)) for link in range(count)]
    levels = [f"level {one} 2 0 {LEVELS['SYS']}" for one in (0, 1)]
    assert read(*map(gpu_line, range(3)), *lines, *levels).links == (
        ("X", "NV16", "SYS"),
        ("NV16", "X", "SYS"),
        ("SYS", "SYS", "X"),
    )


@pytest.mark.parametrize(
    ("level", "kind"),
    [
        ("level 0 1 0 0", "PIX"),  # two GPUs of one board
        ("level 0 1 0 70", "HOST"),  # no level of today
        (f"level 0 1 {_LOST} 10", "HOST"),
        ("", "HOST"),
    ],
)
def test_common_ancestors(level: str, kind: str, read: Reader) -> None:
    assert read(gpu_line(0), gpu_line(1), level).links == (("X", kind), (kind, "X"))


def test_a_gpu_that_is_lost_leaves_the_others_alone(read: Reader, tmp_path: Path) -> None:
    write_sysfs(tmp_path, cpus_of_node={}, node_of_gpu={address_of(0): 0, address_of(1): 0, address_of(2): 1})
    lines = [gpu_line(0), gpu_line(1, code=_LOST), gpu_line(2), *(link_line(gpu, 0) for gpu in range(3))]
    assert read(*lines, "level 0 1 0 10", "level 1 2 0 10") == HostGpus(
        "NVML",
        (address_of(0), None, address_of(2)),
        (0, None, 1),
        (("X", "HOST", "NV1"), ("HOST", "X", "HOST"), ("NV1", "HOST", "X")),
    )


_NO_PROGRAM = "nvidia-smi: [Errno 2] No such file or directory: 'nvidia-smi'"


@pytest.mark.parametrize(
    ("machine", "reason"),
    [([], "sees no GPU"), ([f"init {_DRIVER_NOT_LOADED}", gpu_line(0)], "Driver Not Loaded")],
)
def test_nvml_without_an_answer(machine: list[str], reason: str, read: Reader) -> None:
    assert read(*machine) == HostGpus(f"none (NVML: {reason}; {_NO_PROGRAM})")


def test_no_driver_library(library: Path, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()  # in front of one that the machine may have
    gpus = _run(tmp_path, tmp_path / "none", tmp_path)
    assert gpus == HostGpus(f"none (NVML: NVML Shared Library Not Found; {_NO_PROGRAM})")
    write_nvidia_smi(tmp_path, _TABLE, {0: address_of(0)})
    gpus = _run(tmp_path, tmp_path / "none", tmp_path)
    assert (gpus.source, gpus.links) == ("nvidia-smi (NVML: NVML Shared Library Not Found)", _LINKS)


# nvidia-smi.


def _ask(patch: pytest.MonkeyPatch, folder: Path, *, sysfs: Path) -> HostGpus:
    without_nvml(patch)
    patch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return read_gpus(sysfs=sysfs)


def test_nvidia_smi_where_nvml_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 1 has a NUMA node in sysfs; of the others the table tells it."""
    write_nvidia_smi(tmp_path / "bin", _TABLE, {gpu: address_of(gpu) for gpu in range(4)})
    sysfs = write_sysfs(tmp_path, cpus_of_node={}, node_of_gpu={address_of(0): -1, address_of(1): 7})
    assert _ask(monkeypatch, tmp_path / "bin", sysfs=sysfs) == HostGpus(
        "nvidia-smi (NVML: nvidia-ml-py is not installed)",
        (address_of(0), address_of(1), address_of(2), address_of(3)),
        (0, 7, 2, 3),
        _LINKS,
    )


def test_gpus_that_nvidia_smi_does_not_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = (0x10000, 0xDC, 0x1F)
    write_nvidia_smi(tmp_path, _TABLE, {3: address_of(0), 0: far})
    gpus = _ask(monkeypatch, tmp_path, sysfs=tmp_path)
    assert gpus.addresses == (far, None, None, address_of(0))
    assert gpus.links == _LINKS


_NO_TABLE = (
    'line 1 = "{line}" (nvidia-smi topo -m): no line with the names of the GPUs follows. '
    "Save it with: nvidia-smi topo -m > FILE."
)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 9", "Command '['nvidia-smi', 'topo', '-m']' returned non-zero exit status 9."),
        ("echo no devices", _NO_TABLE.format(line="no devices")),
        ("printf '\\377'", _NO_TABLE.format(line="\ufffd")),
        (
            f"[ $1 = topo ] && cat {DATA}/topo/single_gpu.txt",
            "Command '['nvidia-smi', '--query-gpu=index,pci.bus_id', '--format=csv,noheader']' returned non-zero exit "
            "status 1.",
        ),
    ],
)
def test_nvidia_smi_without_an_answer(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    expected = f"none (NVML: nvidia-ml-py is not installed; nvidia-smi: {reason})"
    assert _ask(monkeypatch, tmp_path, sysfs=tmp_path) == HostGpus(expected)


def test_a_binding_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus(sysfs=tmp_path) == HostGpus(f"none (NVML: the installed pynvml is too old; {_NO_PROGRAM})")


@pytest.mark.parametrize("error", [OSError("libnvidia-ml.so.1: bad ELF"), AttributeError("no such function")])
@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlShutdown"])
def test_a_binding_that_raises_what_it_likes(
    function: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise error

    binding = ModuleType("pynvml")
    for name in ("nvmlInit", "nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlShutdown"):
        setattr(binding, name, lambda: None)
    binding.nvmlDeviceGetCount = lambda: 0  # type: ignore[attr-defined]
    setattr(binding, function, broken)
    monkeypatch.setitem(sys.modules, "pynvml", binding)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = f"{type(error).__name__}: {error}"
    assert read_gpus(sysfs=tmp_path) == HostGpus(f"none (NVML: {reason}; {_NO_PROGRAM})")


def test_a_binding_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("raise OSError('no library')")
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus(sysfs=tmp_path) == HostGpus(f"none (NVML: OSError: no library; {_NO_PROGRAM})")
