"""A refusal of launch/train_hf.py is told once on each host: what is installed may differ between them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import train_hf
from transformers import HfArgumentParser

import ds_hybrid
from ds_hybrid.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(("local_rank", "lines"), [(0, 1), (1, 0)])
def test_one_rank_of_each_host_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local_rank: int, lines: int
) -> None:
    arguments = SimpleNamespace(process_index=8 + local_rank, local_process_index=local_rank)

    def refuse() -> None:
        raise ConfigError("accelerate 9.9: not this one.")

    monkeypatch.setattr(HfArgumentParser, "parse_args_into_dataclasses", lambda self: (None, arguments))
    monkeypatch.setattr(ds_hybrid, "use_with_accelerate", refuse, raising=False)
    assert train_hf.main() == 2
    assert capsys.readouterr().err == "launch/train_hf.py: accelerate 9.9: not this one.\n" * lines


def test_a_refused_checkpoint_is_one_message_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = SimpleNamespace(local_process_index=0)

    def refuse(*_: object) -> None:
        raise CheckpointError("runs/hf/checkpoint-4: of other ranks.")

    monkeypatch.setattr(HfArgumentParser, "parse_args_into_dataclasses", lambda self: (None, arguments))
    monkeypatch.setattr(ds_hybrid, "use_with_accelerate", lambda: None)
    monkeypatch.setattr(train_hf, "train", refuse)
    assert train_hf.main() == 2
    assert capsys.readouterr().err == "launch/train_hf.py: runs/hf/checkpoint-4: of other ranks.\n"
