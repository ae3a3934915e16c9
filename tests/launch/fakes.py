"""What a test machine lacks of a cluster (pdsh, Slurm, other mpiruns), played by small scripts first on PATH."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
BIN = Path(sys.executable).parent

# Notes its arguments, its environment and the files that it was given, one JSON line a call.
RECORDER = f"""#!{sys.executable}
import json, os, sys
def text(path):
    return open(path).read() if path else None
hosts = [value for option, value in zip(sys.argv, sys.argv[1:]) if option in ("--hostfile", "-f")]
record = {{"argv": sys.argv, "env": dict(os.environ), "hosts": text("".join(hosts))}}
record["env_file"] = text(os.environ.get("DS_ENV_FILE"))
print(json.dumps(record), file=open(os.environ["RECORD"], "a"))
"""

# Runs the command for each host as sshd would: in a shell that knows nothing of this one.
PDSH = """#!/usr/bin/env bash
while getopts Sf:w:t: option; do [ "$option" != w ] || hosts=$OPTARG; done
shift $((OPTIND - 1))
IFS=, read -ra hosts <<<"$hosts"
for place in "${!hosts[@]}"; do
    env -i HOME="$HOME" PATH=/usr/bin:/bin bash -c "${*//%n/$place}" &
done
code=0
for job in $(jobs -p); do wait "$job" || code=$?; done
exit "$code"
"""

# Starts a task for each node, in turn.
SRUN = """#!/usr/bin/env bash
echo "$@" >>"$RECORD.srun"
while [[ $1 == -* ]]; do shift; done
SLURM_NODEID=0 "$@" && SLURM_NODEID=1 "$@"
"""
SCONTROL = '#!/bin/sh\n[ "$*" = "show hostnames n[01-02]" ] && printf "n01\\nn02\\n"\n'
MPIRUN_VERSIONS = {"Open MPI": "mpirun (Open MPI) 4.1.4", "MPICH": "HYDRA build details:\n    Version:  5.0.2"}


@dataclass(frozen=True)
class FakeCluster:
    """A folder to start the launch scripts in, with a hostfile of three slots; ``venv`` has a deepspeed that notes."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def venv(self) -> Path:
        return self.folder / "venv"

    def fill(self) -> None:
        (self.folder / "home").mkdir()
        (self.folder / "hosts").write_text("w0 slots=2\nw1 slots=1\n")
        self.program("recorder", RECORDER)
        self.program("venv/bin/deepspeed", RECORDER)
        self.program("venv/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        self.program("bin/ssh", "#!/bin/sh\necho 127.0.0.1\n")
        self.program("bin/pdsh", PDSH)
        self.program("bin/ompi_info", "#!/bin/sh\n")
        self.program("bin/scontrol", SCONTROL)
        self.program("bin/srun", SRUN)
        self.program("bin/nproc", "#!/bin/sh\necho 7\n")
        self.mpirun("MPICH", "venv/bin/mpirun")
        self.mpirun("Open MPI", "bin/mpirun")

    def program(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def mpirun(self, mpi: str, name: str) -> Path:
        version = f'[ "$1" = --version ] && echo "{MPIRUN_VERSIONS[mpi]}" && exit\n'
        return self.program(name, f'#!/bin/sh\n{version}exec {self.folder}/recorder "$@"\n')

    def environment(self, **settings: str) -> dict[str, str]:
        return {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder),
            "RECORD": str(self.folder / "record"),
            "VENV": str(self.venv),
            "HOSTFILE": "hosts",
            "MASTER_PORT": "29611",
            "OMP_NUM_THREADS": "2",
            "TORCH_EXTENSIONS_DIR": "/ext",
            **settings,
        }

    def start(self, script: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [LAUNCH / script, *arguments],
            cwd=self.folder,
            env=self.environment(**settings),
            capture_output=True,
            text=True,
            timeout=120,
        )

    def records(self) -> list[dict[str, Any]]:
        """What the programs that were started noted, in order."""
        path = self.folder / "record"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True)
class DryRun:
    """What ``--dry_run`` printed: under each heading, its lines."""

    sections: list[tuple[str, list[str]]]

    @classmethod
    def parse(cls, output: str) -> DryRun:
        _, *parts = re.split(r"^# (.*)\n", output, flags=re.MULTILINE)
        return cls([(title, text.splitlines()) for title, text in zip(parts[::2], parts[1::2], strict=True)])

    def lines(self, title: str) -> list[str]:
        (lines,) = [lines for name, lines in self.sections if name == title]
        return lines

    @property
    def commands(self) -> list[list[str]]:
        return [shlex.split(line) for name, lines in self.sections if name == "the command" for line in lines]

    @property
    def environment(self) -> dict[str, str]:
        lines = self.lines("the environment of the ranks")
        return {name: value for name, _, value in (line.partition("=") for line in lines)}
