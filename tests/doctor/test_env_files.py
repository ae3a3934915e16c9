"""What is read of .deepspeed_env, against DeepSpeed's own reading and the shells of other hosts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ds_hybrid.doctor.env_files import EnvFiles, parse_env_file, read_env_files

WRONG = "must be NAME=VALUE: DeepSpeed fails there, or hands it on as nonsense. Mend or remove it."
COMMENT = "DeepSpeed fails at a comment or blank line; launch/run_hostfile.sh leaves it out. Remove it."


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("", {}),
        ("A=1\nB=x y\n", {"A": "1", "B": "x y"}),
        (" A = 1 \r\nB_2==\n", {"A": "1", "B_2": "="}),
        ("A=1\nA=2", {"A": "2"}),
        ("A=", {"A": ""}),
    ],
)
def test_variables(text: str, variables: dict[str, str]) -> None:
    assert parse_env_file(text) == (variables, [], [])
    # As deepspeed.launcher.runner.main has it.
    pairs = [line.split("=", maxsplit=1) for line in text.splitlines()]
    assert {name.strip(): value.strip() for name, value in pairs} == variables


@pytest.mark.parametrize(
    ("text", "wrong", "comments"),
    [
        ("A=1\n\nB=2\n", [], ['line 2 = "" (F)']),
        (
            "# to all hosts\nA=1\n  # and this=that\n \t\n",
            [],
            ['line 1 = "# to all hosts" (F)', 'line 3 = "# and this=that" (F)', 'line 4 = "" (F)'],
        ),
        ("A=1\nexport B=2\n", ['line 2 = "export B=2" (F)'], []),
        ("A\n#\n1A=2\n=3\n", ['line 1 = "A" (F)', 'line 3 = "1A=2" (F)', 'line 4 = "=3" (F)'], ['line 2 = "#" (F)']),
    ],
)
def test_lines_that_are_no_variables(text: str, wrong: list[str], comments: list[str]) -> None:
    _, *found = parse_env_file(text)
    assert [[problem.line("F") for problem in problems] for problems in found] == [
        [f"{line}: {WRONG}" for line in wrong],
        [f"{line}: {COMMENT}" for line in comments],
    ]


def test_the_files_are_deepspeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    assert read_env_files({}, severity="error") == EnvFiles({}, ())
    (home / ".deepspeed_env").write_text("A=home\nB=home\n")
    (work / ".deepspeed_env").write_text("A=work\n\nB\n")
    (work / "other").write_text("C=other\nD\n")
    read = read_env_files({}, severity="error")
    assert read.variables == {"A": "work", "B": "home"}
    assert [(one.severity, one.check, one.message) for one in read.findings] == [
        ("error", "env_file", f'line 3 = "B" (.deepspeed_env): {WRONG}'),
        ("warning", "env_file", f'line 2 = "" (.deepspeed_env): {COMMENT}'),
    ]
    for name in ("other", str(work / "other")):
        read = read_env_files({"DS_ENV_FILE": name}, severity="warning")
        assert read.variables == {"C": "other"}
        assert [one.severity for one in read.findings] == ["warning"]


def test_what_another_host_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = EnvFiles({"PATH": "/opt/bin:$PATH", "MINE": "a  b", "PYTHONHASHSEED": "7"}, ())
    here = {"PYTHONPATH": "/src", "PYTHONHASHSEED": "1", "PYTHONNOUSERSITE": "1", "OTHER": "stays here"}
    shell = subprocess.run(
        ["/bin/bash", "-c", files.exports(here) + "env -0"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    got = dict(item.split("=", maxsplit=1) for item in shell.stdout.split("\0") if item)
    assert (
        got.items()
        >= {
            "PATH": "/opt/bin:/usr/bin:/bin",
            "MINE": "a  b",
            "PYTHONHASHSEED": "7",
            "PYTHONNOUSERSITE": "1",
            "PYTHONPATH": f"{tmp_path}:/src",
        }.items()
    )
    assert "OTHER" not in got


def test_nothing_of_this_host_is_read_as_a_command_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / """a$(touch x)"b'`touch y`;c"""
    folder.mkdir()
    monkeypatch.chdir(folder)
    here = {"PYTHONPATH": "$HOME/src", "PYTHONSTARTUP": '";touch z;"\n\\', "PYTHON;touch x;": "1"}
    done = subprocess.run(
        ["/bin/bash", "-c", EnvFiles({}, ()).exports(here) + "env -0"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    got = dict(item.split("=", maxsplit=1) for item in done.stdout.split("\0") if item)
    assert (got["PYTHONPATH"], got["PYTHONSTARTUP"]) == (f"{folder}:$HOME/src", here["PYTHONSTARTUP"])
    assert done.stderr == ""
    assert list(folder.iterdir()) == []


def test_what_a_rank_here_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin")
    files = EnvFiles({"PATH": "/opt/bin:$PATH"}, ())
    assert files.here({**os.environ, "OTHER": "1"}) == {**os.environ, "OTHER": "1", "PATH": "/opt/bin:/bin"}
