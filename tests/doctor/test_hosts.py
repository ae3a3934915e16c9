"""Hosts asked over an ssh that stands in: what they get, what they tell, how they fail."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from ds_hybrid.doctor import hosts
from ds_hybrid.doctor.env_files import EnvFiles
from ds_hybrid.doctor.facts import NoFacts
from ds_hybrid.doctor.hosts import Answers
from tests.doctor.stand_ins import StandIns, made_facts


def ask_hosts(names: list[str], **variables: str) -> Answers:
    files = EnvFiles(variables, ())
    return hosts.ask_hosts(names, environment=files.here(os.environ), exports=files.exports(os.environ))


def test_this_host_alone(stand_ins: StandIns) -> None:
    answers = ask_hosts([])
    assert answers.here == made_facts("here")
    assert answers.hosts == {}


def test_this_host_is_always_reachable(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "ANSWER_SECONDS", 1)
    stand_ins.does("here", "sleep 600")
    assert ask_hosts([]).here == NoFacts(True, "no answer within 1 seconds")
    stand_ins.does("here", "exit 255")
    assert ask_hosts([]).here == NoFacts(True, "exit code 255")


def test_every_host_is_asked_and_each_failure_told(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "ANSWER_SECONDS", 10)
    monkeypatch.setattr(hosts, "_HOSTS_AT_ONCE", 3)
    stand_ins.tells("w0", made_facts("w0"))
    stand_ins.refuses("w1", "Warning: added\nssh: connect to host w1 port 2222: Connection refused\n")
    stand_ins.does("me@w2", "echo 'bash: line 1: /venv/bin/python: No such file or directory' >&2; exit 127")
    stand_ins.does("w3", "exit 4")
    stand_ins.does("w4", "echo stuck; sleep 600")
    answers = ask_hosts(["w0", "w1", "me@w2", "w3", "w4"])
    assert answers.here == made_facts("here")
    assert answers.hosts == {
        "w0": made_facts("w0"),
        "w1": NoFacts(False, "ssh: connect to host w1 port 2222: Connection refused"),
        "me@w2": NoFacts(True, "bash: line 1: /venv/bin/python: No such file or directory"),
        "w3": NoFacts(True, "exit code 4"),
        "w4": NoFacts(False, "no answer within 10 seconds"),
    }


def test_what_a_host_is_asked(stand_ins: StandIns) -> None:
    stand_ins.does("w0", f"env >{stand_ins.folder}/env; pwd >{stand_ins.folder}/pwd")
    stand_ins.does("here", f"env >{stand_ins.folder}/env.here")
    ask_hosts(["w0"], PATH="/opt/bin:$PATH", DS_ACCELERATOR="cuda")
    cwd = os.getcwd()
    assert (stand_ins.folder / "pwd").read_text() == f"{cwd}\n"
    told = (stand_ins.folder / "env").read_text().splitlines()
    assert {"PATH=/opt/bin:/usr/bin:/bin", "DS_ACCELERATOR=cuda", f"PYTHONPATH={cwd}"} <= set(told)
    here = (stand_ins.folder / "env.here").read_text().splitlines()
    assert {f"PATH=/opt/bin:{os.environ['PATH']}", "DS_ACCELERATOR=cuda"} <= set(here)
    (login,) = stand_ins.logins
    # No port and no user: they are the ssh configuration's.
    assert login.startswith("-o BatchMode=yes -o ConnectTimeout=10 -- w0 export ")
    assert login.endswith(f"cd {cwd} && {sys.executable} -m ds_hybrid.doctor.collect")


def test_a_folder_that_a_host_lacks(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/no such folder")
    answers = ask_hosts(["w0"])
    answer = answers.hosts["w0"]
    assert isinstance(answer, NoFacts)
    assert answer.is_reachable
    assert answer.reason.endswith("/no such folder: No such file or directory")


def test_no_ssh(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    answers = ask_hosts(["w0", "w1"])
    no_ssh = NoFacts(False, "there is no ssh on PATH here")
    assert (answers.here, answers.hosts) == (made_facts("here"), {"w0": no_ssh, "w1": no_ssh})


def test_the_real_ssh_takes_no_name_for_an_option(stand_ins: StandIns) -> None:
    """Should a name slip past the hostfile's check. As an option it would show the version of ssh, and succeed."""
    (stand_ins.folder / "bin" / "ssh").unlink()
    if shutil.which("ssh") is None:
        pytest.skip("no ssh on PATH")
    answer = ask_hosts(["-V"]).hosts["-V"]
    assert isinstance(answer, NoFacts)
    assert not answer.is_reachable
    assert "OpenSSH" not in answer.reason
