"""Kinds of arguments that several sub-commands take."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """An integer of at least 1; argparse tells what else it is."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer >= 1")
    return int(text)
