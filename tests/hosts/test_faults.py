"""A rank, a host or a cable fails during training: the run ends with an error, and nothing of it goes on."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.lab import LAUNCH, ROOT, SMALL, Lab, hosts_up, wait_for

pytestmark = pytest.mark.launch

TIMEOUT_SECONDS = 10
"""Of the process groups, in the ds_config."""
ENDS_WITHIN = TIMEOUT_SECONDS + 60
"""Seconds from the fault to the end of the run, on a machine that is busy with other things."""
KEEP_ALIVE = "-o ServerAliveInterval=5 -o ServerAliveCountMax=2"
"""For pdsh's ssh, which would wait for ever for a host that has fallen silent."""


@pytest.fixture
def lab(can_have_hosts: None, tmp_path: Path) -> Iterator[Lab]:
    """Hosts of a test's own: it breaks them."""
    with hosts_up(tmp_path) as lab:
        yield lab


def kill_a_rank(lab: Lab) -> None:
    rank = next(one for one in lab.processes("w1") if "train.py" in one.command and "--local_rank=1" in one.command)
    lab.call("exec", "w1", "kill", "-KILL", str(rank.pid))


def switch_off(lab: Lab) -> None:
    lab.call("off", "w1")


def unplug(lab: Lab) -> None:
    lab.call("unplug", "w1")


GONE = r"Connection (closed|reset) by peer"
SILENT = rf"Timed out waiting {TIMEOUT_SECONDS}000ms"


@pytest.mark.parametrize(
    ("fail", "slots", "message", "clean_hosts", "hosts_without_ranks"),
    [
        pytest.param(kill_a_rank, 2, GONE, ["w0", "w1"], [], id="rank killed"),
        pytest.param(switch_off, 1, f"{GONE}|{SILENT}", ["w0"], [], id="host switched off"),
        # Its sshd waits for a peer that has gone.
        pytest.param(unplug, 1, SILENT, ["w0"], ["w1"], id="host unplugged"),
    ],
)
def test_a_fault_ends_the_run_on_the_hosts_that_are_left(
    lab: Lab,
    tmp_path: Path,
    fail: Callable[[Lab], None],
    slots: int,
    message: str,
    clean_hosts: list[str],
    hosts_without_ranks: list[str],
) -> None:
    config = json.loads((ROOT / "ds_configs" / "two_stage_zero1.json").read_text())
    config["ds_hybrid"]["topology"]["timeout_seconds"] = TIMEOUT_SECONDS
    (tmp_path / "ds.json").write_text(json.dumps(config))
    log = tmp_path / "log.jsonl"
    options = ["--deepspeed_config", "ds.json", *SMALL, "--steps", "1000000", "--log-file", str(log)]
    command = [str(LAUNCH / "run_hostfile.sh"), *options]
    hostfile = str(lab.hostfile(tmp_path, slots=slots))
    with lab.started(command, tmp_path, HOSTFILE=hostfile, PDSH_SSH_ARGS_APPEND=KEEP_ALIVE) as (process, output):
        wait_for(lambda: log.exists() and log.stat().st_size > 0, process, output)
        fail(lab)
        try:
            code = process.wait(timeout=ENDS_WITHIN)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"goes on {ENDS_WITHIN} s after the fault:\n{output.read_text()[-4000:]}") from error
        told = output.read_text()
        assert code not in (0, 130), told
        assert re.search(message, told), told
        assert [process for host in clean_hosts for process in lab.left(host)] == []
        assert [
            process for host in hosts_without_ranks for process in lab.left(host, of="train.py", seconds=ENDS_WITHIN)
        ] == []
