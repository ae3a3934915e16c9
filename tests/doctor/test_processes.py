"""Programs that end, fail, hang and start others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest

from ds_hybrid.doctor.processes import Command, Outcome, run_together

LONG = 60.0
SHORT = 3.0


def shell(script: str) -> Command:
    return Command(["/bin/bash", "-c", script], os.environ)


def children_of(folder: Path) -> list[psutil.Process]:
    """The processes that the scripts of a test have started and noted."""
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def test_outcomes_come_in_order() -> None:
    scripts = ["sleep 0.2; echo one; echo two >&2; exit 3", "kill -9 $$", "cat; echo $MINE"]
    commands = [Command(shell(script).argv, {**os.environ, "MINE": "4"}) for script in scripts]
    assert run_together(commands, time_limit=LONG) == [
        Outcome(3, "one\n", "two\n"),
        Outcome(-9, "", ""),
        Outcome(0, "4\n", ""),
    ]


def test_what_is_late_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    # With job control each job has a process group of its own, as ninja's compilers have.
    start = f"set -m; sleep 600 & echo $! >{tmp_path}/%s.pid; echo started; %s"
    commands = [shell(start % ("late", "wait")), shell(start % ("left", "exit 0"))]
    assert run_together(commands, time_limit=SHORT) == [Outcome(None, "started\n", ""), Outcome(0, "started\n", "")]
    assert len(list(tmp_path.glob("*.pid"))) == 2
    psutil.wait_procs(children_of(tmp_path), timeout=LONG)
    assert not [process for process in children_of(tmp_path) if process.status() != psutil.STATUS_ZOMBIE]


def test_the_killed_are_told_before() -> None:
    told: list[int] = []

    def note(processes: Collection[int]) -> None:
        told.extend(processes)
        assert all(psutil.pid_exists(process) for process in processes)

    (outcome,) = run_together([shell("echo $$; sleep 600 & echo $!; wait")], time_limit=SHORT, before_kill=note)
    assert sorted(told) == sorted(map(int, outcome.output.split()))


def test_one_failure_ends_those_that_depend_on_each_other() -> None:
    commands = [shell("sleep 600"), shell("exit 1"), shell("exit 0")]
    codes = [outcome.code for outcome in run_together(commands, time_limit=600, failure_grace=SHORT)]
    assert codes == [None, 1, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_them_too(number: signal.Signals, tmp_path: Path) -> None:
    script = f"""
import os
from ds_hybrid.doctor.processes import Command, run_together
run_together([Command(["/bin/sh", "-c", "sleep 600 & echo $! >{tmp_path}/one.pid; echo >{tmp_path}/ready; wait"],
    os.environ)], time_limit=600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as parent:
        while not (tmp_path / "ready").exists():
            assert parent.poll() is None
        parent.send_signal(number)
        code = parent.wait(timeout=LONG)
    assert code == (-number if number == signal.SIGINT else 128 + number)
    psutil.wait_procs(children_of(tmp_path), timeout=LONG)
    assert not [process for process in children_of(tmp_path) if process.status() != psutil.STATUS_ZOMBIE]


def test_signals_mean_afterwards_what_they_meant_before() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    run_together([shell("exit 0")], time_limit=LONG)
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize(
    ("errors", "complaint"),
    [
        ("", ""),
        ("Warning: Permanently added 'w1'.\nHost key verification failed.\n", "Host key verification failed"),
        ("bash: line 1: /venv/bin/python: No such file or directory\n", None),
        (
            "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torch'\n"
            "[W1129 21:39:53 destroy_process_group was not called]\n",
            "ModuleNotFoundError: No module named 'torch'",
        ),
        (
            "[rank1]: Traceback (most recent call last):\n[rank1]: torch.distributed.DistBackendError: NCCL error\n\n",
            "torch.distributed.DistBackendError: NCCL error",
        ),
    ],
)
def test_complaint(errors: str, complaint: str | None) -> None:
    assert Outcome(1, "", errors).complaint == (errors.strip() if complaint is None else complaint)
