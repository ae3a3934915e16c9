"""docs/troubleshooting.md lists every message that the code can raise, and no other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.messages import Message, head_of, messages_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
ENTRY = re.compile(r"^- `([^`]+)`\s+—\s+(\S)", re.MULTILINE)

ROOMS: Mapping[str, str] = {
    "ds_hybrid/topology/": "Machines, links and hostfiles",
    "ds_hybrid/engine/groups": "Machines, links and hostfiles",
    "ds_hybrid/engine/expert_layout": "Machines, links and hostfiles",
    "ds_hybrid/dispatch/": "Dispatch",
    "ds_hybrid/moe/": "Layers",
    "ds_hybrid/attention/": "Attention",
    "ds_hybrid/rebalance/": "Experts that move",
    "ds_hybrid/placement": "Experts that move",
    "ds_hybrid/engine/checkpoint": "Checkpoints",
    "ds_hybrid/engine/load_plan": "Checkpoints",
    "ds_hybrid/engine/universal": "Checkpoints",
    "ds_hybrid/engine/": "The engine",
    "ds_hybrid/hf/trainer": "Hugging Face's Trainer",
    "ds_hybrid/hf/": "Checkpoints",
    "ds_hybrid/observe/": "Events and reports",
    "ds_hybrid/plan/": "Planner and commands",
    "ds_hybrid/calibrate/": "Planner and commands",
    "ds_hybrid/cli/": "Planner and commands",
    "ds_hybrid/doctor/": "ds_hybrid doctor",
    "ds_hybrid/": "The ds_config",
    "launch/": "launch/train.py",
}
"""The section of the page for each room: the first that fits."""

NOT_ERRORS = {
    'Did you mean "…"',  # the end of other messages
    "not measured, as there was one host: taken as inside",  # a note in a machine table
    "By the model of docs/planner.md, not measured",  # notes under tables
    "! does not fit: a rank has … GB",
    "rank's over the mean; GB: memory of a rank at its fullest",
    "Left out: … takes a token's experts from … of … groups",
    "… … … - Value: …. - Default: … json … ",  # in docs/configuration.md
    "Sizes stay where DeepSpeed has them",
}
"""Sentences in files with errors that are none."""


def in_code() -> dict[str, Message]:
    files = [*sorted((ROOT / "ds_hybrid").rglob("*.py")), *sorted((ROOT / "launch").glob("*.py"))]
    found = {}
    for file in files:
        for message in messages_of(file.read_text(), str(file.relative_to(ROOT))):
            found.setdefault(message.head, message)
    return {head: message for head, message in found.items() if head not in NOT_ERRORS}


def section(message: Message) -> str:
    return next(title for start, title in ROOMS.items() if message.file.startswith(start))


def test_every_message_is_explained_and_none_that_is_gone() -> None:
    code, page = in_code(), ENTRY.findall(PAGE.read_text())
    heads = [head for head, _ in page]
    to_add = [
        f"under {section(message)}:\n- `{head}` — CAUSE AND FIX ({message.file}:{message.line})"
        for head, message in code.items()
        if head not in heads
    ]
    to_remove = [f"- `{head}`" for head in heads if head not in code]
    twice = sorted({head for head in heads if heads.count(head) > 1})
    lines = [*(to_add and ["Add to docs/troubleshooting.md", *to_add]), *(to_remove and ["Remove", *to_remove])]
    assert not lines, "\n".join(lines)
    assert not twice


def test_every_entry_is_read() -> None:
    """A line that looks like an entry and is not read as one would escape the check."""
    text = PAGE.read_text()
    assert len(re.findall(r"^- ", text, re.MULTILINE)) == len(ENTRY.findall(text))


SOURCE = '''
"""A docstring. With sentences."""
from ds_hybrid.errors import ConfigError
KEY = "ds_hybrid.some.key"
ADVICE = {"word": "no such word. Leave it out."}
def rule(path, size):
    """Another docstring. It is none."""
    text = f"{size} of {path}: must be even. Take another."
    assert size, "a bug is no message. Not this."
    print("Neither is this. It is told.")
    if size > 3:
        raise ConfigError(f"{KEY} = {size}: at most " f"3 are possible. Lower it.")
    yield Problem("some.path", "missing. Set it.")
    raise AssertionError("also a bug. Really.")
'''


def test_what_counts_as_a_message() -> None:
    assert [message.head for message in messages_of(SOURCE, "file.py")] == [
        "no such word",
        "… of …: must be even",
        "ds_hybrid.some.key = …: at most 3 are possible",
        "missing. Set it",
    ]


@pytest.mark.parametrize(
    ("pattern", "head"),
    [
        ("…: missing. Copy it.", "…: missing"),
        ("missing. Set it, or set the other. Then go on.", "missing. Set it, or set the other"),
        ("…: …. Must be the same.", "…: …. Must be the same"),
        ("must be ….…", "must be …"),
        ("see `a.b`: line 3. Done.", "see a.b: line 3"),
    ],
)
def test_the_beginning_of_a_message(pattern: str, head: str) -> None:
    assert head_of(pattern) == head
