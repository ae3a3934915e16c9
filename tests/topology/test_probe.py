"""What one rank reports of itself: which GPU it is on, whatever CUDA calls it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ds_hybrid.topology.cluster import RankReport
from ds_hybrid.topology.probe import report_of_this_rank
from ds_hybrid.topology.this_host import key_of_this_host
from tests.topology.machines import DATA, link_table
from tests.topology.stand_ins import (
    address_of,
    compile_nvml,
    nvml_lines,
    put_on_gpu,
    without_nvml,
    write_nvidia_smi,
    write_sysfs,
)

_TABLE = link_table("hgx_h100_8gpu")
_ADDRESSES = [address_of(gpu) for gpu in range(8)]
_REPORT = """
import os, pathlib, sys
import pytest
from ds_hybrid.topology.cluster import RankReport
from ds_hybrid.topology.probe import report_of_this_rank
from tests.topology.stand_ins import address_of, put_on_gpu
in_cuda_order = [address_of(gpu) for gpu in (7, 6, 5, 4, 3, 2, 1, 0)]
for case in sys.argv[2:]:
    os.environ["CUDA_VISIBLE_DEVICES"], current = case.split("/")
    with pytest.MonkeyPatch.context() as patch:
        put_on_gpu(patch, int(current), in_cuda_order=in_cuda_order)
        print(repr(report_of_this_rank(sysfs=pathlib.Path(sys.argv[1]))))
"""


def test_gpu_among_visible_devices_of_another_order(tmp_path: Path) -> None:
    """CUDA numbers the GPUs of this host from the last one, and CUDA_VISIBLE_DEVICES permutes some of them."""
    compile_nvml(tmp_path)
    (tmp_path / "machine.txt").write_text("\n".join([*nvml_lines(_TABLE, has_switches=True), ""]))
    sysfs = write_sysfs(
        tmp_path / "sys",
        cpus_of_node={5: "0-4095"},
        node_of_gpu={address_of(gpu): node for gpu, node in enumerate((0, 0, 0, 0, 1, 1, -1, 1))},
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "STAND_IN_NVML": str(tmp_path / "machine.txt")}
    command = [sys.executable, "-c", _REPORT, sysfs, "5/0", "0,3,6/1", "6,1/0", "6,1/1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [eval(line) for line in done.stdout.splitlines() if line.startswith("(RankReport")] == [
        (RankReport(key_of_this_host(), socket.gethostname(), gpu, node, _TABLE.links_of(gpu)), "NVML")
        for gpu, node in ((2, 0), (4, 1), (1, 0), (6, 5))  # of GPU 6 nobody knows the node: that of the CPUs
    ]


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    return write_sysfs(tmp_path / "sys", cpus_of_node={5: "0-4095"}, node_of_gpu={address_of(2): 1})


def test_gpu_in_the_text_of_nvidia_smi(tmp_path: Path, sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_nvml(monkeypatch)
    topo = (DATA / "topo" / "hgx_h100_8gpu.txt").read_text(encoding="utf-8")
    write_nvidia_smi(tmp_path / "bin", topo, dict(enumerate(_ADDRESSES)))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    put_on_gpu(monkeypatch, 2, in_cuda_order=_ADDRESSES)
    report, source = report_of_this_rank(sysfs=sysfs)
    assert (report.device, report.numa_node, report.links) == (2, 1, _TABLE.links_of(2))
    assert source == "nvidia-smi (NVML: nvidia-ml-py is not installed)"

    put_on_gpu(monkeypatch, 0, in_cuda_order=[(0, 0xAB, 0)])
    report, source = report_of_this_rank(sysfs=sysfs)
    assert (report.device, report.numa_node, report.links) == (None, 5, None)
    assert source == "none (nvidia-smi (NVML: nvidia-ml-py is not installed) does not list this rank's GPU)"


def test_gpu_of_which_only_sysfs_tells(tmp_path: Path, sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_nvml(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    put_on_gpu(monkeypatch, 0, in_cuda_order=[address_of(2)])
    report, source = report_of_this_rank(sysfs=sysfs)
    assert (report.device, report.numa_node, report.links) == (None, 1, None)
    assert source == (
        "none (NVML: nvidia-ml-py is not installed; nvidia-smi: [Errno 2] No such file or directory: 'nvidia-smi')"
    )


def test_rank_without_a_gpu(sysfs: Path) -> None:
    assert report_of_this_rank(sysfs=sysfs) == (
        RankReport(key_of_this_host(), socket.gethostname(), numa_node=5),
        "none (the accelerator is cpu)",
    )
