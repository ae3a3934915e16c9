"""This machine, asked for real, and with things that are broken."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from ds_hybrid.doctor.collect import NVLINK_SECONDS, source_digest
from ds_hybrid.doctor.facts import HostFacts, from_output
from ds_hybrid.observe.nvlink import GpuUse, NotAvailable
from ds_hybrid.topology.cluster import RankReport
from ds_hybrid.topology.this_host import key_of_this_host, numa_node_of_this_process


def collected(**environment: str) -> HostFacts:
    done = subprocess.run(
        [sys.executable, "-m", "ds_hybrid.doctor.collect"],
        env={**os.environ, "DS_ACCELERATOR": "cpu", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(done.stdout.splitlines()) == 1, "what libraries print belongs on stderr"
    facts = from_output(done.stdout)
    assert isinstance(facts, HostFacts)
    return facts


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_this_machine(tmp_path: Path) -> None:
    (tmp_path / "fused_adam").mkdir()
    lock = tmp_path / "fused_adam" / "lock"
    lock.touch()
    program(tmp_path / "bin" / "ninja", "#!/bin/sh\necho 1.10.0\n")
    program(tmp_path / "bin" / "mine", "#!/bin/sh\nprintf 'mine 7.1\\nCopyright\\n'\n")
    facts = collected(
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        CXX="mine",
        TORCH_EXTENSIONS_DIR=str(tmp_path),
        GLOO_SOCKET_IFNAME="lo",
    )
    name = socket.gethostname()
    assert (facts.host_name, facts.host_key) == (name, key_of_this_host())
    assert facts.addresses == tuple(dict.fromkeys(str(one[4][0]) for one in socket.getaddrinfo(name, None)))
    assert facts.python == platform.python_version()
    names = ("ds_hybrid", "deepspeed", "torch", "transformers", "accelerate", "peft")
    assert facts.packages == {one: version(one) for one in names}
    assert (facts.ninja, facts.compiler) == ("1.10.0", "mine 7.1")
    assert (facts.accelerator, facts.backend, facts.devices, facts.failure) == ("cpu", "gloo", (), None)
    assert facts.reports == (RankReport(key_of_this_host(), name, numa_node=numa_node_of_this_process()),)
    assert facts.links_source == "none (the accelerator is cpu)"
    assert facts.gloo_interface == "lo"
    assert facts.lock_pattern == f"{tmp_path}/*/lock"
    assert [(one.path, one.is_held) for one in facts.locks] == [(str(lock), False)]


def test_a_machine_without_tools_whose_torch_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13:\\n cannot open it')\n")
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    held = [tmp_path / "cache[1]" / "torch_extensions" / f"{python}_cpu" / "op" / "lock"]
    others = [tmp_path / "cache[1]" / "torch_extensions" / "py27_cpu" / "op" / "lock"]
    for path in (*held, *others):
        path.parent.mkdir(parents=True)
        path.touch()
    with held[0].open():
        facts = collected(
            PYTHONPATH=str(tmp_path),
            PATH=str(tmp_path),
            XDG_CACHE_HOME=str(tmp_path / "cache[1]"),
            TORCH_EXTENSIONS_DIR="",
            GLOO_SOCKET_IFNAME="",
        )
    assert facts.failure == "OSError: libcudart.so.13:"
    assert (facts.accelerator, facts.backend, facts.reports, facts.links_source) == (None, None, (), None)
    assert (facts.ninja, facts.compiler, facts.gloo_interface) == (None, None, None)
    assert [(one.path, one.is_held) for one in facts.locks] == [(str(path), True) for path in held]


@pytest.mark.parametrize("change", ["content", "name", "more"])
def test_source_digest_changes_with_the_sources_alone(change: str, tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    before = source_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("not Python")
    assert source_digest(tmp_path) == before
    assert len(before) == 12
    if change == "content":
        (tmp_path / "a.py").write_text("x = 2\n")
    elif change == "name":
        (tmp_path / "b.py").rename(tmp_path / "c.py")
    else:
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "a.py").write_text("")
    assert source_digest(tmp_path) != before


STAND_IN = Path(__file__).parents[1] / "observe" / "data" / "stand_in_nvml.c"
# One H100 with two links that stand still, and a GPU without NVLink; see the head of STAND_IN.
MACHINE = """\
gpu GPU-0 0
field 0 91 0 0 1 0 2
link 0 0 0 1
link 0 1 0 1
field 0 164 0 0 1 0 26562
field 0 164 1 0 1 0 26562
field 0 138 -1 0 3 0 700
field 0 139 -1 0 3 0 7
gpu GPU-1 0
"""


def test_nvlink_use_over_the_window(tmp_path: Path) -> None:
    """The real binding over a stand-in for the driver's library."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install 'ds_hybrid[nvml]'")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (gcc or cc) on PATH")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", STAND_IN], check=True)
    (tmp_path / "machine.txt").write_text(MACHINE)
    settings = {"LD_LIBRARY_PATH": str(tmp_path), "STAND_IN_NVML": str(tmp_path / "machine.txt")}
    use = collected(**settings).nvlink_use
    assert not isinstance(use, NotAvailable)
    moved, none = use[0], use[1]
    assert isinstance(moved, GpuUse)
    assert moved.seconds is not None
    assert moved == GpuUse("NVML", moved.seconds, 0.0, 0.0, 2 * 26.562e9)
    assert moved.seconds >= NVLINK_SECONDS
    assert none == NotAvailable("it has no NVLink")


def test_no_nvlink_use_without_a_driver_or_with_a_broken_binding(tmp_path: Path) -> None:
    for text, reason in (
        ("raise ImportError", "nvidia-ml-py is not installed: pip install 'ds_hybrid[nvml]'"),
        ("raise OSError('no library')", "OSError: no library"),
    ):
        (tmp_path / "pynvml.py").write_text(text)
        assert collected(PYTHONPATH=str(tmp_path)).nvlink_use == NotAvailable(reason)
