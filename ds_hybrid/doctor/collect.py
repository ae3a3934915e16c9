"""The facts of the host that it runs on. ``python -m ds_hybrid.doctor.collect`` prints them as one line."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from glob import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import ds_hybrid
from ds_hybrid.doctor.facts import PACKAGES, HostFacts, to_line
from ds_hybrid.doctor.locks import find_locks
from ds_hybrid.observe.nvlink import GpuCounters, NotAvailable, NvlinkUse, read_counters, use_between
from ds_hybrid.topology.cluster import RankReport
from ds_hybrid.topology.this_host import key_of_this_host

NVLINK_SECONDS: Final = 1.0
"""The window over which the use of NVLinks is told."""

_TOOL_SECONDS = 20
_GIB = 2**30


def collect() -> HostFacts:
    """Ask this host. Imports torch and DeepSpeed, and survives it when they do not load."""
    accelerator, failure = _load_accelerator()
    pattern = _lock_pattern()
    return HostFacts(
        host_name=socket.gethostname(),
        host_key=key_of_this_host(),
        addresses=_addresses(socket.gethostname()),
        python=platform.python_version(),
        packages={name: _installed(name) for name in PACKAGES},
        source_digest=source_digest(Path(ds_hybrid.__file__).parent),
        ninja=_first_line(["ninja", "--version"]),
        compiler=_first_line([os.environ.get("CXX", "c++"), "--version"]),
        accelerator=accelerator.name if accelerator else None,
        backend=accelerator.backend if accelerator else None,
        devices=accelerator.devices if accelerator else (),
        links_source=accelerator.links_source if accelerator else None,
        reports=accelerator.reports if accelerator else (),
        nvlink_use=_nvlink_use(),
        gloo_interface=os.environ.get("GLOO_SOCKET_IFNAME") or None,
        lock_pattern=pattern,
        locks=find_locks(pattern),
        failure=failure,
    )


def source_digest(package: Path) -> str:
    """A fingerprint of the Python files below ``package``: 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class _Accelerator:
    """As the attributes of HostFacts."""

    name: str
    backend: str
    devices: tuple[str, ...]
    reports: tuple[RankReport, ...]
    links_source: str


def _load_accelerator() -> tuple[_Accelerator | None, str | None]:
    """DeepSpeed's accelerator, or why there is none."""
    try:
        import torch
        from deepspeed.accelerator import get_accelerator

        from ds_hybrid.topology.probe import report_of_this_rank

        found = get_accelerator()
        name, backend = found.device_name(), found.communication_backend_name()
        if name == "cpu":
            report, source = report_of_this_rank()
            return _Accelerator(name, backend, (), (report,), source), None
        devices, reports, source = [], [], "none"
        for place in range(found.device_count()):
            found.set_device(place)
            report, source = report_of_this_rank()
            reports.append(report)
            label = torch.cuda.get_device_name(place) if name == "cuda" else found.device_name(place)
            devices.append(f"{label} ({found.total_memory(place) / _GIB:.0f} GiB)")
        return _Accelerator(name, backend, tuple(devices), tuple(reports), source), None
    except Exception as error:  # a broken library raises what it likes
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def _nvlink_use() -> NvlinkUse:
    """Over NVLINK_SECONDS, where there are counters to read at all."""
    try:
        before = read_counters()
        if isinstance(before, NotAvailable):
            return before
        if any(isinstance(gpu, GpuCounters) for gpu in before.values()):
            time.sleep(NVLINK_SECONDS)
        return use_between(before, read_counters())
    except Exception as error:  # a broken binding raises what it likes
        return NotAvailable(f"{type(error).__name__}: {error}".splitlines()[0])


def _addresses(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.splitlines() or [""])[0].strip() or None


def _lock_pattern() -> str:
    """Where torch compiles extensions: TORCH_EXTENSIONS_DIR, or a folder for each Python and accelerator."""
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return os.path.join(escape(os.path.abspath(folder)), "*", "lock")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}_*"
    return os.path.join(escape(cache), "torch_extensions", python, "*", "lock")


@contextlib.contextmanager
def _stdout_kept_clean() -> Iterator[int]:
    """Gives stdout, as a file descriptor; what libraries write to stdout meanwhile goes to stderr."""
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        yield ours
    finally:
        os.dup2(ours, 1)
        os.close(ours)


if __name__ == "__main__":
    with _stdout_kept_clean() as stdout:
        os.write(stdout, f"{to_line(collect())}\n".encode())
