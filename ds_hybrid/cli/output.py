"""Tables and figures of the commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_hybrid.errors import HybridError


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, its cells flush right under one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


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
