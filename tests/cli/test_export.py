"""The command, from arguments to files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ds_hybrid.cli.main import main
from tests.hf.test_export import MODEL, write_checkpoint
from tests.multirank.models import make_model


def test_it_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = write_checkpoint(tmp_path / "run", is_converted=True)
    make_model(MODEL).config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    out = tmp_path / "out"
    arguments = ["--config", str(tmp_path), "--tag", "step1", "--dtype", "bf16", "--max-shard-size", "1GB"]
    assert main(["export", str(tmp_path / "run"), str(out), *arguments]) == 0
    assert capsys.readouterr().out == f"{out}: written (bf16)\n"
    weight = load_file(out / "model.safetensors")["lm_head.weight"]
    assert torch.equal(weight, state["lm_head.weight"].bfloat16())


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    message = f"{tmp_path / 'none'}: no such folder. Name the folder that save_checkpoint was given.\n"
    assert capsys.readouterr().err == message
