"""What tells a host apart, and NUMA nodes from a sysfs that stands in for the kernel's."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ds_hybrid.topology.this_host import (
    PciAddress,
    key_of_this_host,
    numa_node_of_device,
    numa_node_of_this_process,
)
from tests.topology.stand_ins import write_sysfs

_PRINT_KEY = [sys.executable, "-c", "from ds_hybrid.topology.this_host import *; print(key_of_this_host())"]


def test_processes_of_one_host_have_one_key() -> None:
    done = subprocess.run(_PRINT_KEY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == key_of_this_host()


def test_hosts_of_one_name_have_different_keys() -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("unshare --uts needs root on Linux")
    done = subprocess.run(["unshare", "--uts", *_PRINT_KEY], capture_output=True, text=True, check=True)
    name, boot, namespace = done.stdout.split()
    own_name, own_boot, own_namespace = key_of_this_host().split()
    assert (name, boot) == (own_name, own_boot) == (socket.gethostname(), own_boot)
    assert namespace != own_namespace


def test_machines_of_one_name_have_different_keys() -> None:
    """Their namespaces have one number, that of every machine's first one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        pytest.skip("this kernel has no boot_id")
    assert key_of_this_host().split()[1] == boot.read_text().strip()


@pytest.mark.parametrize(
    ("address", "node"),
    [
        ((0, 0x1A, 0), 0),
        ((0, 0xDC, 0), 1),
        ((0x10000, 0x0F, 0x1D), 12),
        ((0, 0x02, 0), None),  # -1: unknown
        ((0, 0x03, 0), None),  # not a number
        ((0, 0x04, 0), None),  # no such device
    ],
)
def test_numa_node_of_a_device(address: PciAddress, node: int | None, tmp_path: Path) -> None:
    known: dict[PciAddress, int | str] = {(0, 0x1A, 0): 0, (0, 0xDC, 0): 1, (0x10000, 0x0F, 0x1D): 12}
    sysfs = write_sysfs(tmp_path, cpus_of_node={}, node_of_gpu={**known, (0, 0x02, 0): -1, (0, 0x03, 0): "?"})
    assert numa_node_of_device(address, sysfs=sysfs) == node


@pytest.mark.parametrize(
    ("allowed", "node"),
    [
        ({0, 1, 2, 3}, 0),
        ({8}, 0),
        ({4, 7, 9}, 1),
        ({12}, 10),
        ({3, 4}, None),  # two nodes
        ({0, 4, 12}, None),
        ({100}, None),  # of no node
    ],
)
def test_numa_node_of_a_process(
    allowed: set[int], node: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sysfs = write_sysfs(tmp_path, cpus_of_node={0: "0-3,8", 1: "4-7,9-11", 2: "", 10: "12"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed)
    assert numa_node_of_this_process(sysfs=sysfs) == node


def test_real_affinity_of_a_process(tmp_path: Path) -> None:
    own = min(os.sched_getaffinity(0))
    sysfs = write_sysfs(tmp_path, cpus_of_node={3: f"{own}", 5: f"{own + 1}-4095"})
    code = (
        "import os, pathlib, sys\n"
        "from ds_hybrid.topology.this_host import numa_node_of_this_process\n"
        f"os.sched_setaffinity(0, {{{own}}})\n"
        "print(numa_node_of_this_process(sysfs=pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(sysfs)], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"


def test_no_sysfs(tmp_path: Path) -> None:
    assert numa_node_of_this_process(sysfs=tmp_path) is None
