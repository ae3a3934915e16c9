"""``ds_hybrid simulate-rebalance``: what it prints, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ds_hybrid.cli.main import main
from tests.rebalance.traces import FOLDER

AUX = str(FOLDER / "e32k2_aux1e-2.npz")
DRAWN = str(FOLDER / "synth_stationary.npz")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate-rebalance", *arguments]) == 0
    return capsys.readouterr().out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ep", "8", "--algorithm", "swap", "--interval", "50", "--json"]
    facts = json.loads(printed(capsys, AUX, *options))
    assert (facts["algorithm"], facts["ep_size"], facts["interval"], facts["half_life"]) == ("swap", 8, 50, 50)
    assert (facts["num_rebalances"], facts["first_step"], facts["num_steps_scored"]) == (10, 574, 500)
    assert facts["spread_before"] == pytest.approx(20.66, abs=0.01)
    assert facts["max_over_mean_before"] == pytest.approx(1.181, abs=5e-4)
    assert facts["spread_after"] <= 9.0
    assert facts["max_over_mean_after"] <= 1.08
    assert facts["moved_fraction_per_rebalance"] == pytest.approx(facts["num_moves"] / (10 * 4 * 32))
    assert facts["moved_fraction_per_rebalance"] <= 0.15
    assert facts["bytes_moved"] == facts["num_moves"] * 14 * 2 * 128 * 128
    assert len(facts["layers"]) == 4
    assert sum(layer["bytes_moved"] for layer in facts["layers"]) == facts["bytes_moved"]


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, AUX, "--ep", "8", "--algorithm", "static").splitlines()
    assert lines == [
        f"{AUX}: 1148 steps, 4 layers, 32 experts",
        "static on 8 ranks, every 50 steps, loads of half-life 50; steps 574 to 1074, 100 added up",
        "",
        "layer  spread before   after  max/mean before  after  moves  MB moved",
        "    0         ±25.4%  ±25.4%            1.254  1.254      0       0.0",
        "    1         ±22.8%  ±22.8%            1.148  1.148      0       0.0",
        "    2         ±13.8%  ±13.8%            1.131  1.131      0       0.0",
        "    3         ±20.6%  ±20.6%            1.191  1.191      0       0.0",
        "  all         ±20.7%  ±20.7%            1.181  1.181      0       0.0",
        "",
        "critical path 1.181 -> 1.181 of the mean; ranks' totals over layers ±10.5% -> ±10.5%",
        "moves at 10 rebalances: 0, 0 across nodes; 0.0% of the experts each time, 0.0% at most",
        "bytes: 14 for each of 32,768 parameters of an expert",
    ]


def test_bytes_need_the_size_of_an_expert(capsys: pytest.CaptureFixture[str]) -> None:
    assumed = printed(capsys, DRAWN, "--ep", "8")
    assert assumed.endswith("14 for each of 4,718,592 parameters of an expert, assumed: --expert-parameters\n")
    given = json.loads(printed(capsys, DRAWN, "--ep", "8", "--expert-parameters", "1000", "--json"))
    assert given["bytes_moved"] == given["num_moves"] * 14_000 > 0


def test_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ep", "8", "--nodes", "2", "--json", "--cross-node-penalty"]
    flat, priced = (json.loads(printed(capsys, AUX, *options, penalty)) for penalty in ("1", "8"))
    assert 0 < priced["num_moves_across_nodes"] < flat["num_moves_across_nodes"] <= flat["num_moves"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"balance.{suffix}"
    printed(capsys, AUX, "--ep", "8", "--plot", str(file))
    assert file.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_plot_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["simulate-rebalance", AUX, "--ep", "8", "--plot", str(tmp_path / "x.png")]) == 2
    assert capsys.readouterr().err == "--plot needs matplotlib. Install it: pip install 'ds_hybrid[report]'.\n"


def test_plot_of_no_known_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["simulate-rebalance", AUX, "--ep", "8", "--plot", str(tmp_path / "x.docx")]) == 2
    assert "x.docx: Format 'docx' is not supported" in capsys.readouterr().err


def test_mistakes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "flat.npz", counts=np.ones((5, 32), np.int64))
    for arguments, message in [
        ([AUX, "--ep", "5"], "32 experts cannot be spread evenly over 5 ranks. "),
        ([AUX, "--ep", "8", "--nodes", "3"], "--nodes 3 does not divide --ep 8. Nodes must be equal."),
        (
            [AUX, "--ep", "8", "--start", "1100"],
            "the trace has 1148 steps: start 1100 must be at least 0 and leave 100 ",
        ),
        ([str(tmp_path / "flat.npz"), "--ep", "8"], f"{tmp_path}/flat.npz: counts is int64 [5, 32], must be integers "),
        ([str(tmp_path / "none.npz"), "--ep", "8"], f"{tmp_path}/none.npz: No such file or directory"),
    ]:
        assert main(["simulate-rebalance", *arguments]) == 2
        assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ep", "0"], "argument --ep: '0' must be an integer >= 1"),
        (["--ep", "8", "--half-life", "0"], "argument --half-life: '0' must be a number > 0"),
        (["--ep", "8", "--min-gain", "-1"], "argument --min-gain: '-1' must be a number >= 0"),
        (["--ep", "8", "--kappa", "nan"], "argument --kappa: 'nan' must be a number >= 0"),
        (["--ep", "8", "--cross-node-penalty", "0.5"], "argument --cross-node-penalty: '0.5' must be a number >= 1"),
        (["--ep", "8", "--algorithm", "best"], "argument --algorithm: invalid choice: 'best' "),
        ([], "the following arguments are required: --ep"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["simulate-rebalance", AUX, *arguments])
    assert leaving.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"ds_hybrid simulate-rebalance: error: {message}")


def test_replaying_imports_neither_torch_nor_deepspeed() -> None:
    code = f"""
import sys
from ds_hybrid.cli.main import main
status = main(["simulate-rebalance", {AUX!r}, "--ep", "8", "--algorithm", "lpt_swap"])
print(status, sorted({{"torch", "deepspeed", "transformers", "matplotlib"}} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n0 []\n")
