"""``ds_hybrid plan``: what it prints, what it writes, and what it asks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ds_hybrid.cli.main import main
from ds_hybrid.plan import search as search_module

EXAMPLE = ["plan", "--world-size", "16", "--seq-len", "32768", "--model", "qwen3_30b_a3b", "--cluster", "a100x8_ib200"]
TINY = ["plan", "--world-size", "2", "--seq-len", "256", "--model", "tiny_qwen3_moe", "--cluster", "cpu2"]


_ASKED = ("find_problems", "plan_layout", "slowest_ring", "dispatch_cost", "memory", "step_time")


def test_the_ten_best_with_a_reason_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXAMPLE, "--rule", "article"]) == 0
    out = capsys.readouterr().out
    assert "30.5 B parameters, 3.35 B active" in out
    assert "16 ranks on 2 hosts of a100x8_ib200" in out
    assert [line.split()[0] for line in out.splitlines() if line[:2].strip().isdecimal() and line[2] == " "][-1] == "10"
    assert out.count("EP groups") + out.count("every rank has all experts") == 10
    assert "TP 16 (as printed it can only give 1 or 16)" in out
    assert "plan B: TP 2, EP 8" in out
    assert "16 sequences a step" in out
    assert "Ours takes TP 1, SP " in out


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXAMPLE, "--json", "--rule", "article", "--routing", "uniform", "--zero-stage", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["inputs"]["seq_len"] == 32768
    assert document["fits"] is True
    assert document["article"]["plan"] == "B"
    for plan in document["plans"]:
        assert plan["zero_stage"] == 3
        assert plan["memory_bytes"]["peak"] <= plan["memory_bytes"]["of"]
        seconds = plan["step_seconds"]
        parts = sum(value for name, value in seconds.items() if name not in ("total", "hidden"))
        assert parts == pytest.approx(seconds["total"])
        assert plan["load_max_over_mean"] == pytest.approx(1)
        assert set(plan["wire_bytes_of_rank"]) < set(seconds)


def test_what_it_writes_is_what_validate_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    command = ["plan", "--world-size", "64", "--seq-len", "32768", "--model", "qwen3_235b_a22b"]
    assert main([*command, "--cluster", "a100x8_ib200", "--write", str(file)]) == 0
    assert main(["validate", str(file), "--world-size", "64", "--num-experts", "128"]) == 0
    header = json.loads(file.read_text())["ds_hybrid"]["plan"]
    assert header["needs"] == {"activation_checkpoints": True, "loss_chunk": 2048}
    assert header["predicted"]["needs"] == ["checkpoints", "loss in chunks"]
    assert header["inputs"]["cluster"] == "a100x8_ib200"
    assert header["predicted"]["tokens_per_second"] > 0
    assert capsys.readouterr().err == (
        f"wrote {file}; train with launch/train.py --deepspeed_config {file} --seq-len 32768 --model (the config.json "
        "of qwen3_235b_a22b)\n"
    )


def test_nothing_is_written_when_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    command = ["plan", "--world-size", "8", "--seq-len", "4096", "--model", "deepseek_v3", "--cluster", "a100x8_ib200"]
    assert main([*command, "--write", str(file)]) == 2
    captured = capsys.readouterr()
    assert "Nothing fits. The least is" in captured.out
    assert captured.err == f"--write {file}: nothing fits, so there is nothing to write.\n"
    assert not file.exists()


def test_a_hostfile_gives_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=8\ntwo slots=8\n")
    command = f"plan --hostfile {hosts} --seq-len 4096 --model qwen3_30b_a3b --cluster h200x8_ib400".split()
    assert main(command) == 0
    assert "16 ranks on 2 hosts" in capsys.readouterr().out
    assert main([*command, "--world-size", "8"]) == 2
    assert "has 16 slots. Leave it out." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "qwen4"], "qwen4: neither a file nor one of the models"),
        (["--cluster", "a100"], "a100: neither a file nor one of the machines"),
        (["--seq-len", "5000"], "--seq-len 5000: tiny_qwen3_moe has max_position_embeddings 4096"),
        (["--routing", "zipf"], '--routing "zipf": the exponent must be'),
    ],
)
def test_wrong_arguments(change: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *change]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_a_limit_of_routing_that_is_left_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    change = [*EXAMPLE, "--zero-stage", "1"]
    assert main([word.replace("qwen3_30b_a3b", "deepseek_v3").replace("32768", "4096") for word in change]) == 0
    assert "Left out: deepseek_v3 takes a token's experts from 4 of 8 groups." in capsys.readouterr().out
    assert main(change) == 0
    assert "takes a token's experts from" not in capsys.readouterr().out


def test_a_plan_needs_no_torch_and_asks_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long is asked once for all that share it: ``validate`` about a ds_config, groups of each two sizes.

    What does not fit is not timed.
    """
    check = "import sys; from ds_hybrid.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check, *EXAMPLE], check=True, capture_output=True, timeout=60)
    asked = {name: Counter[str]() for name in _ASKED}

    def counting(name: str, function: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            asked[name][repr((arguments, options))] += 1
            return function(*arguments, **options)

        return counted

    for name in asked:
        monkeypatch.setattr(search_module, name, counting(name, getattr(search_module, name)))
    assert main(EXAMPLE) == 0
    for name, counts in asked.items():
        assert counts, name
        assert counts.most_common(1)[0][1] == 1, name
    assert sum(asked["plan_layout"].values()) <= 5 * 5  # the sizes that divide 16 ranks
    assert sum(asked["slowest_ring"].values()) <= 4 * 5  # kinds of groups, of which many are one set
    assert sum(asked["step_time"].values()) < sum(asked["memory"].values()) / 2


def test_help_imports_neither_torch_nor_deepspeed() -> None:
    check = (
        "import sys; from ds_hybrid.cli.main import main\n"
        "try: main(['plan', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, timeout=60)
