"""A file of ``ds_hybrid plan --write``, trained by launch/train.py, with what the plan asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from ds_hybrid.cli.main import main
from tests.launch.test_train import ROOT, RUN_LOCAL, Run, run

pytestmark = pytest.mark.launch

SEQ_LEN = 8192
OPTIONS = ["--seq-len", str(SEQ_LEN), "--steps", "2", "--eval-batches", "1"]
MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 8192,
}


def planned(folder: Path, gigabytes: float) -> Path:
    """The best plan for two ranks with so much memory each."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    table = yaml.safe_load((ROOT / "ds_configs" / "machines" / "cpu2.yaml").read_text())
    table["memory_bytes"]["value"] = gigabytes * 1e9
    table["usable_memory"]["value"] = 1.0
    (folder / "machine.yaml").write_text(yaml.safe_dump(table))
    file = folder / "mine.json"
    command = f"plan --world-size 2 --seq-len {SEQ_LEN} --model {folder}/config.json --cluster {folder}/machine.yaml"
    assert main([*command.split(), "--dtype", "float32", "--zero-stage", "1", "--write", str(file)]) == 0
    return file


@pytest.fixture(scope="module")
def as_asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A plan for little memory, and its run."""
    folder = tmp_path_factory.mktemp("plan")
    file = planned(folder, 0.15)
    model = ["--model", str(folder / "config.json")]
    return file, run(RUN_LOCAL, folder / "run", *OPTIONS, *model, "--deepspeed_config", str(file))


def test_a_written_plan_trains_and_asks_for_savings(as_asked: tuple[Path, Run]) -> None:
    file, trained = as_asked
    plan = json.loads(file.read_text())["ds_hybrid"]["plan"]
    assert plan["needs"] == {"activation_checkpoints": True, "loss_chunk": 2048}
    assert trained.code == 0, trained.output
    assert "saving memory        activation checkpoints, logits of 2048 tokens at a time" in trained.output
    assert list(trained.losses) == [1, 2]


def test_the_command_line_overrides_the_plan_and_the_losses_stay(as_asked: tuple[Path, Run], tmp_path: Path) -> None:
    file, trained = as_asked
    command = [
        "--deepspeed_config",
        str(file),
        "--model",
        str(file.parent / "config.json"),
        "--no-activation-checkpoints",
        "--loss-chunk",
        "0",
    ]
    plain = run(RUN_LOCAL, tmp_path / "run", *OPTIONS, *command)
    assert plain.code == 0, plain.output
    assert "saving memory" not in plain.output
    assert plain.losses == pytest.approx(trained.losses, rel=1e-5)
