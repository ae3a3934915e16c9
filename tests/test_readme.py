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


def test_the_tree_names_every_file_where_it_is() -> None:
    root = Path(__file__).parent.parent
    named = files_of_the_tree(README.split("## The tree")[1].split("```")[1])
    there = {
        path.relative_to(root)
        for folder, pattern in (("ds_hybrid", "*.py"), ("launch", "*.py"), ("launch", "*.sh"), ("docs", "*.md"))
        for path in (root / folder).rglob(pattern)
        if path.name != "__init__.py"
    }
    assert there - named == set()
    assert {path for path in named if not (root / path).exists()} == set()


def files_of_the_tree(tree: str) -> set[Path]:
    """Each name belongs to the last folder above it that is indented less."""
    files: set[Path] = set()
    folders: dict[int, Path] = {-1: Path()}
    for line in filter(str.strip, tree.splitlines()):
        indent = len(line) - len(line.lstrip())
        folders = {depth: folder for depth, folder in folders.items() if depth < indent}
        folder = folders[max(folders)]
        if heading := re.match(r" *(\w+)/(?: |$)", line):
            folder = folders[indent] = folder / heading[1]
        names = re.findall(r"(?<![\w/])\w+\.(?:py|sh|sbatch|yaml|md|css|js)\b(?!/)", line)
        files |= {folder / name for name in names}
    return files
