"""Kinds of arguments that several sub-commands take."""

from __future__ import annotations

import argparse
from pathlib import Path


def count(text: str) -> int:
    """An integer of at least 1; argparse tells what else it is."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer >= 1")
    return int(text)


def output_file(text: str) -> Path:
    """A file in a folder that is there: what is wrong with it is told before the work."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder. Name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}. Make it first")
    return path
