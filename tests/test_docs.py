"""The pages of docs/ say what the package does: keys, ds_configs, commands and links."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import hjson
import pytest

from ds_hybrid import cli
from ds_hybrid.config import HybridConfig, find_problems, find_warnings
from ds_hybrid.topology.description import parse_cluster

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
BASE = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The fenced blocks of a page that name one of the languages; "" is none."""
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        if language in languages:
            yield text


def ds_configs() -> Iterator[tuple[str, str]]:
    """Each with the name of its page."""
    for page in PAGES:
        for text in blocks(page, "json", "jsonc"):
            if page.name != "configuration.md":
                yield page.name, text


@pytest.mark.parametrize(("page", "text"), list(ds_configs()))
def test_every_ds_config_of_a_page_is_right(page: str, text: str) -> None:
    document = hjson.loads(text)
    if document.keys() <= HybridConfig.model_fields.keys():  # a page may show a part of the section alone
        document = {"ds_hybrid": document}
    assert find_problems({**BASE, **document}, name=page, num_experts=16) == []
    assert find_warnings({**BASE, **document}, name=page) == []


@pytest.mark.parametrize("text", [text for page in PAGES for text in blocks(page, "yaml")])
def test_every_machine_description_is_right(text: str) -> None:
    assert parse_cluster(text, name="rack.yaml").num_ranks == 8


def commands() -> Iterator[str]:
    """The lines of all pages that call ``ds_hybrid``, but those with "..." or with what may be left out."""
    for page in PAGES:
        for text in blocks(page, "", "bash"):
            for line in text.replace("\\\n", " ").splitlines():
                if line.startswith("ds_hybrid ") and "[" not in line and "..." not in line:
                    yield line


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_every_command_of_a_page_is_one(line: str) -> None:
    parser = argparse.ArgumentParser()
    sub_commands = parser.add_subparsers()
    for module in pkgutil.iter_modules(cli.__path__):
        add_command = getattr(importlib.import_module(f"ds_hybrid.cli.{module.name}"), "add_command", None)
        if add_command is not None:
            add_command(sub_commands)
    parser.parse_args(shlex.split(line, comments=True)[1:])


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()
