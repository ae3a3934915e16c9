"""Tables and figures of the commands."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_hybrid.errors import HybridError


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, its cells flush right under one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def write_aside(path: Path, text: str) -> None:
    """Write a file under another name that it then changes, so that who opens it always finds it whole.

    Raises:
        HybridError: it cannot be written; the message names ``--out``.
    """
    place = path.resolve()
    aside = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        if place.exists() and not place.is_file():  # a device or a pipe, such as /dev/stdout
            place.write_text(text, encoding="utf-8")
            return
        try:
            aside.write_text(text, encoding="utf-8")
            aside.replace(place)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise HybridError(f"{path}: {error.strerror}. Name another file with --out.") from error


def new_figure(width: float, height: float, *, option: str = "--plot") -> Any:
    """An empty matplotlib figure, in inches, for an option of the command line.

    Raises:
        HybridError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HybridError(f"{option} needs matplotlib. Install it: pip install 'ds_hybrid[report]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write it in the format that the name asks for.

    Raises:
        HybridError: there is no such format.
    """
    try:
        figure.savefig(path)
    except ValueError as error:
        raise HybridError(f"--plot {path}: {error}") from error
