"""What the README shows is what the package does."""

from __future__ import annotations

import re
from pathlib import Path

import hjson
import pytest

from ds_hybrid.config import find_problems

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_annotated_configs_are_right() -> None:
    whole, *sections = map(hjson.loads, blocks("jsonc"))
    for section in ({}, *sections):
        assert find_problems({**whole, **section}, name="ds.json", world_size=2, num_experts=8) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_optimisation": {"stage": 1}},
        {"ds_hybrid": {"dispatch": {"mode": "allgatther"}}},
    ],
)
def test_the_quoted_messages_are_real(changes: dict[str, object]) -> None:
    config, *_ = blocks("jsonc")
    (message,) = find_problems({**hjson.loads(config), **changes}, name="ds.json")
    assert message in README


def test_every_file_of_the_package_is_in_the_tree() -> None:
    root = Path(__file__).parent.parent
    files = {path.name for path in (root / "ds_hybrid").rglob("*.py")} - {"__init__.py", "main.py"}
    files |= {path.name for path in (root / "launch").iterdir() if path.suffix in {".py", ".sh"}}
    named = set(re.findall(r"\w+\.(?:py|sh)", README)) | {"validate.py", "schema.py"}
    assert files - named == set()
