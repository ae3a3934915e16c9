"""docs/configuration.md: current, with every key, and with examples that a ds_config may hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ds_hybrid import config
from ds_hybrid.cli.main import main
from ds_hybrid.cli.reference import REFERENCE_PATH, examples, reference
from ds_hybrid.config import HybridConfig, find_problems, find_warnings
from ds_hybrid.problems import listed

BASE = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}


def test_the_reference_is_current() -> None:
    assert REFERENCE_PATH.read_text() == reference(), "Run: ds_hybrid schema --markdown"


def test_the_reference_has_every_key_once() -> None:
    keys = {
        f"{name}.{key}" if value is not None else name
        for name, value in HybridConfig().model_dump().items()
        for key in (value or {None: None})
    }
    text = reference()
    assert set(examples()) == keys
    assert all(len(re.findall(rf"^##+ {re.escape(key)}$", text, re.MULTILINE)) == 1 for key in keys)


@pytest.mark.parametrize("path", list(examples()))
def test_every_example_is_valid_and_sets_its_key(path: str) -> None:
    document = {**BASE, **examples()[path]}
    assert find_problems(document, name="ds.json", world_size=8) == []
    assert find_warnings(document, name="ds.json") == []
    value: Any = document["ds_hybrid"]
    for key in path.split("."):
        value = value[key]


def test_the_reference_has_every_refused_value() -> None:
    tables = [table for name, table in vars(config).items() if name.startswith("NOT_")]
    assert len(tables) == 4
    rows = {f"| `{path}` | `{listed(works)}` |" for table in tables for path, works in table.items()}
    assert rows <= set(reference().splitlines())


def test_write_then_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    REFERENCE_PATH.parent.mkdir()
    REFERENCE_PATH.write_text("# Another page\n")
    assert main(["schema", "--markdown", "--check"]) == 2
    assert main(["schema", "--markdown"]) == 0
    assert main(["schema", "--markdown", "--check"]) == 0
    assert REFERENCE_PATH.read_text() == reference()
    assert capsys.readouterr().err == "docs/configuration.md: not current. Run `ds_hybrid schema --markdown`.\n"
