"""Hosts that are not there: what they tell, and an ssh and a Python, first in their place, that bring it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ds_hybrid.doctor.facts import HostFacts, to_line
from ds_hybrid.observe.nvlink import NotAvailable
from ds_hybrid.topology.cluster import RankReport

# Logs in as sshd does: a shell that knows nothing of this one.
SSH = """#!/usr/bin/env bash
echo "$*" >>{folder}/ssh.log
while [[ $1 != -- ]]; do shift 2; done
host=$2
shift 2
[ ! -e "{folder}/$host.refusal" ] || {{ cat "{folder}/$host.refusal" >&2; exit 255; }}
exec env -i HOME="$HOME" PATH=/usr/bin:/bin DOCTOR_HOST="$host" bash -c "$*"
"""

# Tells what the host would, and plays a rank.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    "-m ds_hybrid.doctor.collect") exec bash "{folder}/${{DOCTOR_HOST:-here}}.sh" ;;
    "-m ds_hybrid.doctor.rank") exec bash "{folder}/rank.sh" ;;
    *) exit 99 ;;
esac
"""


def made_facts(name: str = "w0", **changes: Any) -> HostFacts:
    """A CPU host of a healthy run, but for ``changes``."""
    facts = HostFacts(
        host_name=name,
        host_key=f"key of {name}",
        addresses=("192.0.2.7",),
        python="3.11.7",
        packages={
            "ds_hybrid": "0.1.0",
            "deepspeed": "0.19.8",
            "torch": "2.13.0+cpu",
            "transformers": "5.24.0",
            "accelerate": "1.15.0",
            "peft": "0.21.2",
        },
        source_digest="0123456789ab",
        ninja="1.13.2",
        compiler="c++ (GCC) 12.2.0",
        accelerator="cpu",
        backend="gloo",
        devices=(),
        links_source="none (the accelerator is cpu)",
        reports=(RankReport(f"key of {name}", name),),
        nvlink_use=NotAvailable("NVML sees no GPU"),
        gloo_interface=None,
        lock_pattern="/nowhere/*/lock",
        locks=(),
        failure=None,
    )
    return replace(facts, **changes)


def made_gpu_facts(name: str, links: list[list[str]], numa_nodes: list[int], **changes: Any) -> HostFacts:
    """A host with a GPU for each row of ``links``."""
    return made_facts(
        name,
        packages={**made_facts().packages, "torch": "2.13.0+cu130"},
        accelerator="cuda",
        backend="nccl",
        devices=("NVIDIA H200 (140 GiB)",) * len(links),
        links_source="NVML",
        reports=tuple(
            RankReport(f"key of {name}", name, device=gpu, numa_node=numa_nodes[gpu], links=tuple(row))
            for gpu, row in enumerate(links)
        ),
        **changes,
    )


@dataclass(frozen=True)
class StandIns:
    """``folder`` holds what each host does when it is asked, ``here`` being this one, and what a ``rank`` does."""

    folder: Path

    def tells(self, name: str, facts: HostFacts) -> None:
        (self.folder / f"{name}.facts").write_text(f"Welcome to {name}!\n{to_line(facts)}\n")
        self.does(name, f"cat {self.folder}/{name}.facts")

    def does(self, name: str, script: str) -> None:
        (self.folder / f"{name}.sh").write_text(script)

    def refuses(self, name: str, message: str) -> None:
        (self.folder / f"{name}.refusal").write_text(message)

    @property
    def logins(self) -> list[str]:
        """The arguments of each ssh, sorted."""
        return sorted((self.folder / "ssh.log").read_text().splitlines())


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """An empty working folder and home. No host tells anything yet, but ``here`` and its ranks are healthy."""
    folder = tmp_path / "stand_ins"
    for name, text in (("ssh", SSH), ("python", PYTHON), ("pdsh", "#!/bin/sh\n")):
        path = folder / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(folder=folder))
        path.chmod(0o755)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("PYTHON") or name == "DS_ENV_FILE"]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python"))
    made = StandIns(folder)
    made.tells("here", made_facts("here"))
    made.does("rank", 'echo "sum 3.0 to 3.0"')
    return made
