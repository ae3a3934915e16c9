"""``ds_hybrid validate`` on real files, the shipped ones first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_hybrid.cli.main import main

GOOD: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "summary"),
    [
        ("alltoall_zero2_bf16.json", "dispatch alltoall, EP size 2, ZeRO stage 2"),
        ("plan_a_zero1_bf16.json", "dispatch replicated, EP size 4, ZeRO stage 1"),
        ("plan_b_zero1_bf16.json", "dispatch two_stage, EP size 8, ZeRO stage 1"),
        ("rebalance_zero1_bf16.json", "dispatch two_stage, EP size 2, ZeRO stage 1"),
        (
            "sequence_parallel_zero1_bf16.json",
            "dispatch two_stage, EP size 2, SP size 2 (kv_gather auto), ZeRO stage 1",
        ),
        ("trainer_auto.json", "dispatch two_stage, EP size 2, ZeRO stage 1"),
        ("two_stage_zero1.json", "dispatch two_stage, EP size 2, ZeRO stage 1"),
        ("two_stage_zero1_bf16.json", "dispatch two_stage, EP size 2, ZeRO stage 1"),
        ("two_stage_zero3_bf16.json", "dispatch two_stage, EP size 2, ZeRO stage 3"),
    ],
)
def test_shipped_file(file: str, summary: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", f"ds_configs/{file}", "--world-size", "8", "--num-experts", "8"]) == 0
    assert capsys.readouterr().out == f"ds_configs/{file}: ok ({summary})\n"


@pytest.mark.parametrize(
    ("change", "summary"),
    [
        ({}, "dispatch auto, expert_parallel off, ZeRO stage 0"),
        ({"expert_parallel": {"enabled": True}}, "dispatch auto, EP size 1, ZeRO stage 0"),
    ],
)
def test_summary_of_a_short_file(
    change: dict[str, Any], summary: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "x.json").write_text(json.dumps({**GOOD, **change}))
    assert main(["validate", "x.json"]) == 0
    assert capsys.readouterr().out == f"x.json: ok ({summary})\n"


def test_every_file_is_checked_and_every_problem_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "bad.json").write_text(
        json.dumps({**GOOD, "zero_optimisation": {}, "ds_hybrid": {"dispatch": {"guard": 1}}})
    )
    (here / "good.json").write_text(json.dumps(GOOD))
    (here / "broken.json").write_text('{"a": 1} x')
    assert main(["validate", "bad.json", "good.json", "broken.json", "none.json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "good.json: ok (dispatch auto, expert_parallel off, ZeRO stage 0)\n"
    assert printed.err.splitlines() == [
        'zero_optimisation (bad.json): unknown key. Did you mean "zero_optimization"?',
        "ds_hybrid.dispatch.guard = 1 (bad.json): must be true or false.",
        "broken.json: line 1, column 10: Extra data.",
        "none.json: No such file or directory. Check the path.",
    ]


def test_warnings_do_not_fail(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "x.json").write_text(json.dumps({"train_batch_size": 8}))
    assert main(["validate", "x.json"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "x.json: ok (dispatch auto, expert_parallel off, ZeRO stage 0)\n"
    assert printed.err == (
        "warning: gradient_clipping (x.json): missing, and DeepSpeed 0.19.8 then clips at 1.0. "
        "Set it (0.0 turns clipping off).\n"
    )


def test_the_sizes_of_the_run_are_used(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "x.json").write_text(json.dumps({**GOOD, "expert_parallel": {"enabled": True, "autoep_size": 4}}))
    assert main(["validate", "x.json", "--world-size", "8", "--num-experts", "8"]) == 0
    assert main(["validate", "x.json", "--world-size", "6"]) == 2
    assert main(["validate", "x.json", "--num-experts", "6"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "expert_parallel.autoep_size = 4 (x.json): must divide world_size 6. Values that work: 1, 2, 3, 6.",
        "expert_parallel.autoep_size = 4 (x.json): must divide num_experts 6. Values that work: 1, 2, 3, 6.",
    ]
