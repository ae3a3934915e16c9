"""The command: its sub-commands, and how mistakes leave it."""

from __future__ import annotations

import argparse

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


@pytest.mark.parametrize(
    "command",
    [
        "validate",
        "schema",
        "doctor",
        "export",
        "plan",
        "calibrate",
        "simulate-rebalance",
        "universal",
        "report",
        "trace",
    ],
)
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


def test_our_errors_are_printed_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise TopologyError("two hosts, one link")

    monkeypatch.setattr(schema, "run", run)
    assert main(["schema"]) == 2
    assert capsys.readouterr().err == "two hosts, one link\n"
