"""``ds_hybrid simulate``: what it prints, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ds_hybrid.cli.main import main
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.machine import read_machine
from ds_hybrid.plan.memory import memory
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.routing import read_routing
from tests.rebalance.traces import FOLDER

DRAWN = str(FOLDER / "synth_stationary.npz")
TRAINED = str(FOLDER / "e32k2_aux1e-2.npz")
SMALL = ["zipf:1.0,drift=0.01", "--cluster", "a100x8_ib200", "--ranks", "16", "--steps", "20"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cluster", "a100x8_ib200", "--ranks", "16", "--ep", "8,16", "--dispatch", "two_stage,alltoall"]
    facts = json.loads(
        printed(capsys, TRAINED, *options, "--rebalance", "static,swap", "--top-k", "2", "--steps", "120", "--json")
    )
    assert (facts["num_steps"], facts["num_layers"], facts["num_experts"], facts["top_k"]) == (120, 4, 32, 2)
    names = [(run["ep_size"], run["rebalance"], run["dispatch"]) for run in facts["runs"]]
    modes = ("two_stage", "alltoall")
    assert names == [(ep, name, mode) for ep in (8, 16) for name in ("static", "swap") for mode in modes]
    for run in facts["runs"]:
        assert len(run["seconds_of_steps"]) == 120
        assert sum(run["seconds_of_steps"]) / 120 == pytest.approx(run["step_seconds"])
        assert run["step_seconds_p50"] <= run["step_seconds_p99"]
        assert run["tokens_per_second"] * run["step_seconds"] == pytest.approx(16 * 4096)
        assert (run["moved_bytes"] > 0) == (run["num_moves_of_group"] > 0) == (run["rebalance"] == "swap")
        assert (run["num_moves_of_group_across_nodes"] > 0) == (run["rebalance"] == "swap" and run["ep_size"] == 16)
    two_stage, alltoall = facts["runs"][:2]
    assert two_stage["wire_bytes_per_step"] < alltoall["wire_bytes_per_step"]
    assert two_stage["slowest_over_mean_p50"] == alltoall["slowest_over_mean_p50"]


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, *SMALL).splitlines()
    assert lines[:2] == [
        "zipf:1.0,drift=0.01: 20 steps, 48 layers, 128 experts, top-8",
        "qwen3_30b_a3b on 16 ranks of a100x8_ib200: TP 1, ZeRO 1, 1 x 4096 tokens; decisions every 50 steps",
    ]
    assert lines[3].split("  ")[0] == " dispatch"
    assert lines[4].split()[:3] == ["two_stage", "8", "static"]
    assert lines[4].split()[-3:-1] == ["0", "0.0"]
    assert lines[3].split("  ")[-1] == "GB memory"


def test_what_is_left_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cluster", "h200x8_ib400", "--ranks", "1024", "--steps", "2", "--model", "deepseek_v3", "--ep", "32"]
    lines = printed(capsys, "zipf:1.0", *options).splitlines()
    assert lines[-1].startswith("Left out: deepseek_v3 takes a token's experts from 4 of 8 groups. Rows between hosts")
    assert not any("Left out" in line for line in printed(capsys, *SMALL).splitlines())


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit is told; the figures are the planner's, under the same routing."""
    options = [*SMALL, "--ep", "8,16", "--zero-stage", "0"]
    lines = printed(capsys, *options).splitlines()
    assert lines[4].endswith("!")
    assert lines[-1] == "! does not fit: a rank has 73.6 GB. See --checkpoints, --zero-stage, --ep"
    assert printed(capsys, *SMALL, "--checkpoints").splitlines()[-1].startswith("of one group; GB moved")
    options = ["zipf:1.0", *SMALL[1:], "--ep", "8", "--attention", "eager", "--dtype", "float32", "--json"]
    facts = json.loads(printed(capsys, *options))
    machine, model = read_machine("a100x8_ib200"), read_model("qwen3_30b_a3b")
    law = read_routing("zipf:1.0", model)
    planned = memory(model, Workload(4096, 1, 4, "eager"), Candidate(16, 1, 8, 1, "two_stage"), law.demand(8)).peak
    (run,) = facts["runs"]
    assert run["peak_memory_bytes"] == pytest.approx(planned, rel=0.02)
    assert run["fits"] == (run["peak_memory_bytes"] <= machine.memory_bytes)


def test_rows_of_the_article_that_do_not_fit_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Five sequences of 16,384 tokens fit with plan A alone."""
    options = [*SMALL, "--seq-len", "16384", "--article", "--micro-batch", "5"]
    text = printed(capsys, *options).splitlines()
    assert text[-1] == "! does not fit: a rank has 73.6 GB. See --zero-stage, --micro-batch"
    marks = [line.endswith("!") for line in text[3:13]]
    assert marks == [not row["fits"] for row in json.loads(printed(capsys, *options, "--json"))]
    assert any(marks)
    assert not all(marks)


def test_the_articles_techniques(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(printed(capsys, *SMALL, "--seq-len", "32768", "--article", "--json"))
    assert [row["technique"][:2] for row in rows] == ["ba", "1.", "2a", "2b", "3.", "3.", "4.", "4.", "5a", "5b"]
    base, narrow, two_stage, fp8, plan_b = rows[:5]
    assert base["alone"] == base["together"]
    assert narrow["alone"]["choices"]["tp_size"] == 2
    assert two_stage["alone"]["wire_bytes"] < base["alone"]["wire_bytes"]
    # Six rows for each pair, of 2 bytes a value; two go there in e4m3, with a scale of 4 bytes for 128 values.
    assert fp8["alone"]["wire_bytes"] / base["alone"]["wire_bytes"] == pytest.approx((4 + 2 * 132 / 256) / 6, rel=0.002)
    assert plan_b["together"]["choices"] | {"wire_dtype": "", "attention": ""} == {
        "tp_size": 2,
        "ep_size": 8,
        "mode": "two_stage",
        "wire_dtype": "",
        "algorithm": "static",
        "attention": "",
    }
    assert [row["together"] is None for row in rows] == [False] * 5 + [True] * 2 + [False] * 3
    waits, hides = (row["together"]["step"] for row in rows[-2:])
    assert hides < waits
    assert all(row["fits"] for row in rows)
    text = printed(capsys, *SMALL, "--seq-len", "32768", "--article").splitlines()
    assert len(text) == 3 + 10 + 3
    assert text[3].split()[6:8] == ["x", "1.000"]
    assert text[-2].startswith("By the model of docs/planner.md, not measured. x: tokens per second over the base's;")
    assert float(text[3].split()[-1]) == pytest.approx(base["alone"]["peak_memory"] / 1e9, abs=0.05)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"run.{suffix}"
    printed(capsys, *SMALL, "--plot", str(file))
    assert file.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_plot_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["simulate", *SMALL, "--plot", str(tmp_path / "x.png")]) == 2
    assert capsys.readouterr().err == "--plot needs matplotlib. Install it: pip install 'ds_hybrid[report]'.\n"


def test_mistakes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        (["--ranks", "2"], "--ranks 2: must be at least 4."),
        (["--ep", "3"], "128 experts cannot be spread evenly over 3 ranks. "),
        (["--dispatch", "replicated"], "--dispatch replicated with EP 8, TP 1: expert groups must be the "),
        (["--cluster", "a100"], "a100: neither a file nor one of the machines "),
        (["--article", "--plot", "x.png"], "--plot: draws runs, not the article's table."),
        (["--article", "--ep", "4"], "--ep: --article has its own in each row."),
        (["--article", "--wire-dtype", "bf16"], "--wire-dtype: --article has its own in each row."),
        (["--article", "--checkpoints"], "--checkpoints: --article has its own in each row."),
        (["--article", "--ranks", "12"], "--ranks 12: --article has groups of 4 and of 8 ranks."),
        (["--tp", "8"], "--dispatch two_stage with EP 8, TP 8: TP must divide 32 heads and 4 key and value heads."),
        (
            ["--tp", "2", "--ep", "1"],
            "--dispatch two_stage with EP 1, TP 2, ZeRO 1 cannot be trained: ",
        ),
        (["--seq-len", "1000000"], "--seq-len 1000000: qwen3_30b_a3b has max_position_embeddings 40960."),
        (["--top-k", "3"], '"zipf:1.0,drift=0.01": must be a trace\'s .npz file, or zipf:S[,drift=D]'),
    ]:
        assert main(["simulate", *SMALL, *arguments]) == 2
        assert capsys.readouterr().err.startswith(message)
    assert main(["simulate", "none.npz", *SMALL[1:]]) == 2
    assert capsys.readouterr().err == "none.npz: No such file or directory\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ep", "8,0"], "argument --ep: '0' must be an integer >= 1"),
        (["--dispatch", "two_stages"], "argument --dispatch: 'two_stages' must be one of alltoall, allgather, "),
        (["--dispatch", "two_stage,two_stage"], "argument --dispatch: 'two_stage,two_stage' has 'two_stage' twice."),
        (["--ep", "8,4,8"], "argument --ep: '8,4,8' has '8' twice. Name it once"),
        (["--event-seconds", "inf"], "argument --event-seconds: 'inf' must be a number of seconds from 0 on"),
        (["--rebalance", "best"], "argument --rebalance: 'best' must be one of swap, lpt_swap, "),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["simulate", *SMALL, *arguments])
    assert leaving.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"ds_hybrid simulate: error: {message}")


def test_simulating_imports_neither_torch_nor_deepspeed() -> None:
    code = f"""
import sys
from ds_hybrid.cli.main import main
status = main(["simulate", *{SMALL!r}, "--rebalance", "lpt_swap"])
print(status, sorted({{"torch", "deepspeed", "transformers", "matplotlib"}} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n0 []\n")
