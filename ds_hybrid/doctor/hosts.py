"""The facts of this host, and of others over ssh, which gets port, user and key from its own configuration."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ds_hybrid.doctor.facts import HostFacts, NoFacts, from_output
from ds_hybrid.doctor.processes import Command, Outcome, run_together

CONNECT_SECONDS: Final = 10
ANSWER_SECONDS: Final = 120
SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "--")
"""What comes before the host. After ``--`` no name of a host can be an option."""

_QUESTION = ("-m", "ds_hybrid.doctor.collect")
_SSH_FAILED = 255
# Each is a process here.
_HOSTS_AT_ONCE = 64

Answer = HostFacts | NoFacts


@dataclass(frozen=True)
class Answers:
    """What this host tells, and what each host of a hostfile tells by its name there."""

    here: Answer
    hosts: Mapping[str, Answer]


def ask_hosts(names: Sequence[str], *, environment: Mapping[str, str], exports: str) -> Answers:
    """Ask this host, and all ``names`` over ssh at the same time.

    Args:
        names: as a hostfile has them.
        environment: of the question to this host.
        exports: shell commands before the question to another one. Like a launcher's ranks, it is asked in the current
            folder, by the Python that runs here.
    """
    here = Command([sys.executable, *_QUESTION], environment)
    question = f"{exports}cd {shlex.quote(os.getcwd())} && {shlex.join([sys.executable, *_QUESTION])}"
    has_ssh = shutil.which("ssh") is not None
    commands = [here, *(Command([*SSH, name, question], os.environ) for name in names if has_ssh)]
    outcomes: list[Outcome] = []
    for first in range(0, len(commands), _HOSTS_AT_ONCE):
        outcomes += run_together(commands[first : first + _HOSTS_AT_ONCE], time_limit=ANSWER_SECONDS)
    own, *others = [_answer(outcome) for outcome in outcomes]
    if isinstance(own, NoFacts):
        own = replace(own, is_reachable=True)
    if not has_ssh:
        others = [NoFacts(is_reachable=False, reason="there is no ssh on PATH here")] * len(names)
    return Answers(own, dict(zip(names, others, strict=True)))


def _answer(outcome: Outcome) -> Answer:
    facts = from_output(outcome.output)
    if facts is not None:
        return facts
    if outcome.code is None:
        return NoFacts(is_reachable=False, reason=f"no answer within {ANSWER_SECONDS} seconds")
    reason = outcome.complaint or f"exit code {outcome.code}"
    return NoFacts(is_reachable=outcome.code != _SSH_FAILED, reason=reason)
