"""The command: its sub-commands, and how mistakes leave it."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ds_hybrid
from ds_hybrid.cli import schema
from ds_hybrid.cli.main import main
from ds_hybrid.errors import TopologyError


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"ds_hybrid {ds_hybrid.__version__}\n"


def commands() -> list[str]:
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as text:
        main(["--help"])
    return re.findall(r"^    ([a-z-]+) ", text.getvalue(), re.MULTILINE)


@pytest.mark.parametrize("command", commands())
def test_every_command_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    assert f"examples:\n  ds_hybrid {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "ds_hybrid: error: the following arguments are required: COMMAND"),
        (["validate"], "ds_hybrid validate: error: the following arguments are required: FILE"),
        (
            ["validate", "x.json", "--world-size", "0"],
            "ds_hybrid validate: error: argument --world-size: '0' must be an integer >= 1",
        ),
        (
            ["validate", "x.json", "--num-experts", "-4"],
            "ds_hybrid validate: error: argument --num-experts: '-4' must be an integer >= 1",
        ),
        (
            ["schema", "--check", "--out", "x.json"],
            "ds_hybrid schema: error: argument --out: not allowed with argument --check",
        ),
        (["export", "run"], "ds_hybrid export: error: the following arguments are required: OUT"),
        (
            ["export", "run", "out", "--max-shard-size", "5"],
            "ds_hybrid export: error: argument --max-shard-size: '5' must be a size such as 500MB or 5GB",
        ),
        (
            ["export", "run", "out", "--dtype", "int8"],
            "ds_hybrid export: error: argument --dtype: invalid choice: 'int8' (choose from 'fp32', 'bf16', 'fp16')",
        ),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == message


def test_a_reader_that_has_enough_is_no_mistake(tmp_path: Path) -> None:
    """What was to be written is written, and nothing is complained of."""
    file = tmp_path / "mine.json"
    plan = "plan --world-size 2 --seq-len 256 --model tiny_qwen3_moe --cluster cpu2"
    command = f"{sys.executable} -m ds_hybrid.cli.main {plan} --write {file} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr.startswith(f"wrote {file}; train with")
    assert file.exists()


@pytest.mark.parametrize("command", ["plan --write", "calibrate --write", "simulate --plot"])
def test_files_that_cannot_be_written_are_told_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, option = command.split()
    for path, rule in (
        (tmp_path, "is a folder. Name a file in it"),
        (tmp_path / "no" / "x.png", "there is no folder "),
    ):
        with pytest.raises(SystemExit) as leaving:
            main([name, option, str(path)])
        assert leaving.value.code == 2
        assert f"argument {option}: '{path}'" in (told := capsys.readouterr().err)
        assert rule in told


def test_our_errors_are_printed_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise TopologyError("two hosts, one link")

    monkeypatch.setattr(schema, "run", run)
    assert main(["schema"]) == 2
    assert capsys.readouterr().err == "two hosts, one link\n"
