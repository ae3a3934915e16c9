"""Programs run side by side under a time limit, and ended with all that they started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

_POLL_SECONDS: Final = 0.05
_ERROR = re.compile(r"(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)")


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and its environment."""

    argv: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        code: its exit code, negative for a signal; None when it was still running at the end and was killed.
        output: what it wrote to stdout.
        errors: what it wrote to stderr.
    """

    code: int | None
    output: str
    errors: str

    @property
    def complaint(self) -> str:
        """The line of ``errors`` that names the error: a Python exception, else the last one; "" when there is none.

        Without the full stop, as it becomes a part of a sentence.
        """
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        named = [match[1] for line in lines if (match := _ERROR.match(line))]
        return (named or lines or [""])[-1].rstrip(".")


def run_together(
    commands: Sequence[Command],
    *,
    time_limit: float,
    failure_grace: float | None = None,
    before_kill: Callable[[Collection[int]], None] = lambda processes: None,
) -> list[Outcome]:
    """Run all commands at once. What is left of them at the end is killed, also when a signal asks this process to end.

    SIGTERM and SIGHUP then raise SystemExit, so that ``finally`` clauses run as after Ctrl-C.

    Args:
        commands: each gets a session of its own, without a terminal that it could ask for a password.
        time_limit: seconds for all.
        failure_grace: seconds that the others get once one has failed; None when they do not depend on each other.
        before_kill: called with the ids of processes that are about to be killed: all that one command has started.
    """
    processes: list[subprocess.Popen[bytes]] = []
    ended: set[subprocess.Popen[bytes]] = set()
    with tempfile.TemporaryDirectory() as folder, _signals_noted() as signals:
        texts = [(Path(folder, f"{place}.out"), Path(folder, f"{place}.err")) for place in range(len(commands))]
        try:
            for command, (output, errors) in zip(commands, texts, strict=True):
                with output.open("wb") as out, errors.open("wb") as err:
                    processes.append(
                        subprocess.Popen(
                            command.argv,
                            env=command.environment,
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=err,
                            start_new_session=True,
                        )
                    )
            deadline = time.monotonic() + time_limit
            while len(ended) < len(processes) and time.monotonic() < deadline and not signals:
                time.sleep(_POLL_SECONDS)
                for process in processes:
                    status = _status_if_ended(process)
                    if status is not None:
                        ended.add(process)
                        if status != 0 and failure_grace is not None:
                            deadline = min(deadline, time.monotonic() + failure_grace)
        finally:
            for process in processes:
                _end_session(process, before_kill)
        if signals:
            raise KeyboardInterrupt if signals[0] == signal.SIGINT else SystemExit(128 + signals[0])
        codes = [process.returncode if process in ended else None for process in processes]
        return [
            Outcome(code, output.read_text(errors="replace"), errors.read_text(errors="replace"))
            for code, (output, errors) in zip(codes, texts, strict=True)
        ]


def _status_if_ended(process: subprocess.Popen[bytes]) -> int | None:
    """The exit status or the signal of a process that has ended; leaves it to be waited for."""
    result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return result.si_status if result else None


def _end_session(leader: subprocess.Popen[bytes], before_kill: Callable[[Collection[int]], None]) -> None:
    """Kill all that a process has started. Its group is not enough: ninja gives each compiler a group of its own."""
    killed = set[int]()
    while members := _session_members(leader.pid) - killed:
        before_kill(members)
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        killed |= members
    # Not sooner: until then nobody else can get its id.
    leader.wait()


def _session_members(leader: int) -> set[int]:
    members = {leader}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(path.name)) == leader:
                members.add(int(path.name))
    return members


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """The signals that would end this process come to a list. An exception in their place could hit the start of a
    program, which nobody would then know of."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield noted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
