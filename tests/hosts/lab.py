"""Several hosts on this machine (netlab.sh), and runs of the launch scripts on them, over ssh."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
BIN = Path(sys.executable).parent
NETLAB = Path(__file__).with_name("netlab.sh")
SMALL = ["--text", str(ROOT / "LICENSE"), "--seq-len", "32", "--eval-batches", "1"]
"""Options for launch/train.py."""
TIME_LIMIT = 240
"""Seconds for a whole run; several times what it takes on two busy cores."""

_TOOLS = ("ip", "tc", "unshare", "nsenter", "ssh", "ssh-keygen", "/usr/sbin/sshd", "pdsh")
_NAMESPACES = ("unshare", "--net", "--uts", "--mount", "--pid", "--ipc", "--fork")
_OWN_PROCESSES = re.compile(r"bash .*netlab\.sh __init|sshd: .*\[listener\]|sleep 1$|ps -eo")


def what_is_missing() -> str | None:
    """Why this machine cannot play several hosts, and what helps."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "several hosts need root on Linux"
    lacking = [Path(tool).name for tool in _TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)} (Debian: iproute2, openssh-server, pdsh, util-linux)"
    tried = subprocess.run([*_NAMESPACES, "ip", "link", "add", "br0", "type", "bridge"], capture_output=True, text=True)
    return f"no network namespaces or no bridges here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Process:
    """A process of a host; ``pid`` is the host's own number for it."""

    pid: int
    command: str


@dataclass(frozen=True)
class Finished:
    """A run that has ended by itself."""

    code: int
    output: str

    def reports(self) -> list[dict[str, Any]]:
        """What each rank has told with :func:`tell`, in rank order. Lines of ranks may come glued together."""
        found = [json.loads(text) for text in re.findall(r"REPORT (\{.*?\}) END", self.output)]
        return sorted(found, key=lambda report: int(report["rank"]))


def tell(**report: Any) -> None:
    """Print a rank's report."""
    print(f"REPORT {json.dumps(report)} END", flush=True)


@dataclass(frozen=True)
class Lab:
    """Hosts w0, w1, ... with a network, a name, processes and an sshd of their own; the files are this machine's.

    Attributes:
        state: netlab.sh's folder.
        extensions: DeepSpeed's compiled op, the lab's own: a lock file tells nothing about processes of other hosts.
        hosts: the names.
    """

    state: Path
    extensions: Path
    hosts: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Of netlab.sh, for this lab."""
        return {**os.environ, "NETLAB_DIR": str(self.state), "NETLAB_BR": f"ds{os.getpid()}"}

    def call(self, *words: str) -> str:
        """A command of netlab.sh; what it prints."""
        done = subprocess.run([str(NETLAB), *words], env=self.environment, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"netlab.sh {' '.join(words)}: {done.stderr}")
        return done.stdout

    def processes(self, host: str) -> list[Process]:
        """Those that a run has started there, zombies apart."""
        lines = self.call("ps", host).splitlines()[1:]
        fields = [line.split(maxsplit=5) for line in lines]
        return [
            Process(int(pid), command)
            for pid, _, state, _, _, command in fields
            if not state.startswith("Z") and not _OWN_PROCESSES.match(command)
        ]

    def left(self, host: str, *, of: str = "", seconds: float = 20) -> list[Process]:
        """What still runs there, its command with ``of`` in it, when none of it does any more or the time is up."""
        deadline = time.monotonic() + seconds
        while (left := [one for one in self.processes(host) if of in one.command]) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def hostfile(self, folder: Path, *, slots: int) -> Path:
        path = folder / "hosts"
        path.write_text("".join(f"{host} slots={slots}\n" for host in self.hosts))
        return path

    @contextmanager
    def started(
        self, command: Sequence[str], folder: Path, **environment: str
    ) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """A command on the first host, and the file that it writes to. At the end all that it has started is killed."""
        environment = {
            **self.environment,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "VENV": str(BIN.parent),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": str(self.extensions),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",  # the hosts share this machine's cores
            **environment,
        }
        output = folder / "output"
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [str(NETLAB), "exec", self.hosts[0], *command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        try:
            yield process, output
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for host in self._hosts_that_run():
                left = self.processes(host)
                if left:
                    with contextlib.suppress(RuntimeError):  # one may have ended by itself
                        self.call("exec", host, "kill", "-KILL", *(str(one.pid) for one in left))

    def run(self, command: Sequence[str], folder: Path, **environment: str) -> Finished:
        """As :meth:`started`, to the end."""
        with self.started(command, folder, **environment) as (process, output):
            try:
                process.wait(timeout=TIME_LIMIT)
            except subprocess.TimeoutExpired as error:
                raise AssertionError(f"did not end in {TIME_LIMIT} s:\n{output.read_text()[-4000:]}") from error
        return Finished(process.returncode, output.read_text())

    def _hosts_that_run(self) -> list[str]:
        return [line.split()[0] for line in self.call("bytes").splitlines() if not line.endswith(" off")]


@contextmanager
def hosts_up(folder: Path, *, num_hosts: int = 2) -> Iterator[Lab]:
    """A lab, until the end of the block. ``folder`` must exist; what the lab needs is made in it."""
    extensions, compiled = folder / "extensions", Path(os.environ.get("TORCH_EXTENSIONS_DIR", ROOT / ".torch_ext"))
    if compiled.exists():
        shutil.copytree(compiled, extensions, ignore=shutil.ignore_patterns("lock", "cpu_op.flock"))
    lab = Lab(folder / "lab", extensions, tuple(f"w{number}" for number in range(num_hosts)))
    # Takes the lab down when its input ends: with the block, or with this process, however that is ended.
    until_the_end = ["bash", "-c", 'read -r; exec "$0" down >/dev/null', str(NETLAB)]
    with subprocess.Popen(until_the_end, env=lab.environment, stdin=subprocess.PIPE, start_new_session=True):
        lab.call("up", str(num_hosts))
        yield lab


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], output: Path) -> None:
    """Until something has happened in a run that goes on."""
    deadline = time.monotonic() + TIME_LIMIT
    while not condition():
        assert process.poll() is None, f"ended with exit code {process.returncode}:\n{output.read_text()[-4000:]}"
        assert time.monotonic() < deadline, output.read_text()[-4000:]
        time.sleep(0.1)
