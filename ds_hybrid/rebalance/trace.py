"""Routing traces: how many (token, choice) pairs each expert got, for each step and layer. Read from files. Pure."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ds_hybrid.errors import PlacementError

PARTS_FOLDER: Final = "routing_trace"
"""Of a run's directory."""

PART_NAME: Final = "part-{:06}.npz"
"""Of the files in it, counted from 1 and written one after the other."""

_PART: Final = re.compile(r"part-([0-9]+)\.npz")


@dataclass(frozen=True, eq=False)
class Trace:
    """Who was routed where.

    Attributes:
        counts: [T, L, E] int64: (token, choice) pairs of each step, layer and expert.
        expert_parameters: parameters of one expert, if the trace tells.
        top_k: choices of a token, if the trace tells and all its layers have as many.
    """

    counts: npt.NDArray[np.int64]
    expert_parameters: int | None = None
    top_k: int | None = None


def part_number(path: Path) -> int | None:
    """Of a file in that folder; None: it is no part."""
    match = _PART.fullmatch(path.name)
    return int(match[1]) if match else None


def is_trace(text: str) -> bool:
    """Whether a word of a command line is a trace's path, see :func:`read_trace`."""
    return text.endswith(".npz") or Path(text).is_dir()


def read_trace(path: str | Path) -> Trace:
    """A ``.npz`` file with an array ``counts`` [T, L, E] of integers, and perhaps the text ``meta``, a dict; or the
    directory of a run with ``observe.routing_trace``, of whose steps each counts once if it was resumed. A run's steps
    (those of an array ``steps``) in which a layer got no token are passed over.

    Raises:
        PlacementError: the path is something else.
        OSError: it cannot be read.
    """
    if not Path(path).is_dir():
        arrays = _read_arrays(path)
        counts = _checked(path, arrays)
        return _trace(_routed(path, _without_idle(counts) if "steps" in arrays else counts), arrays)
    numbered = [(part_number(file), file) for file in _files_in(Path(path, PARTS_FOLDER))]
    parts = [file for _, file in sorted((number, file) for number, file in numbered if number is not None)]
    if not parts:
        raise PlacementError(
            f"{path}: has no routing trace ({PARTS_FOLDER}/{PART_NAME.format(1)}). Train with "
            "ds_hybrid.observe.routing_trace, or give a trace's .npz file."
        )
    arrays_of_part = [_read_arrays(part) for part in parts]
    return _trace(_routed(path, _without_idle(_joined(parts, arrays_of_part))), arrays_of_part[0])


def _files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _trace(counts: npt.NDArray[np.int64], arrays: dict[str, Any]) -> Trace:
    meta = str(arrays.get("meta", "{}"))
    return Trace(counts, _expert_parameters(meta), _top_k(meta))


def _joined(parts: Sequence[Path], arrays_of_part: Sequence[dict[str, Any]]) -> npt.NDArray[np.int64]:
    """The parts in their order; a step that comes again, and all after it, void what came before."""
    kept: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    for part, arrays in zip(parts, arrays_of_part, strict=True):
        counts = _checked(part, arrays)
        steps = arrays.get("steps")
        if steps is None or steps.shape != counts.shape[:1] or steps.dtype.kind not in "iu":
            raise PlacementError(f"{part}: steps must be one integer for each of {len(counts)} steps. Remove the file.")
        if kept and kept[-1][1].shape[1:] != counts.shape[1:]:
            here, before = (list(shape) for shape in (counts.shape[1:], kept[-1][1].shape[1:]))
            raise PlacementError(
                f"{part}: has [layers, experts] {here}, the part before {before}: two models wrote to one directory. "
                "Remove the parts of one."
            )
        if kept and kept[-1][0].max(initial=steps[0] - 1) >= steps[0]:
            kept = [(s[s < steps[0]], c[s < steps[0]]) for s, c in kept]
        kept.append((steps, counts))
    return np.concatenate([counts for _, counts in kept])


def _read_arrays(path: str | Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (ValueError, zipfile.BadZipFile, EOFError, AttributeError, TypeError) as error:
        raise PlacementError(f"{path}: not a .npz file of plain arrays. Write it with numpy.savez.") from error


def _checked(path: str | Path, arrays: dict[str, Any]) -> npt.NDArray[np.int64]:
    counts = arrays.get("counts")
    if counts is None:
        names = ", ".join(arrays) or "none"
        raise PlacementError(f"{path}: has no array counts, but {names}. counts must be [steps, layers, experts].")
    shape = f"{counts.dtype} {list(counts.shape)}"
    if counts.ndim != 3 or not counts.size or counts.dtype.kind not in "iu":
        raise PlacementError(f"{path}: counts is {shape}, must be integers [steps, layers, experts], none of them 0.")
    counts = counts.astype(np.int64)
    if (counts < 0).any():
        raise PlacementError(f"{path}: counts ({shape}) has {counts.min()}, must be 0 or more.")
    return counts


def _without_idle(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Without the steps in which a layer got no token, but for a trace of nothing else."""
    is_whole = counts.any(-1).all(-1)
    return counts[is_whole] if is_whole.any() else counts


def _routed(path: str | Path, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same; refuses steps in which a layer got no token."""
    empty = np.argwhere(~counts.any(-1))
    if len(empty):
        step, layer = empty[0]
        shape = f"{counts.dtype} {list(counts.shape)}"
        raise PlacementError(f"{path}: counts ({shape}) is 0 for all experts of layer {layer} at step {step}.")
    return counts


def _expert_parameters(meta: str) -> int | None:
    """As the text says, or two matrices between the widths d and h, as the traces' models have."""
    try:
        settings = ast.literal_eval(meta)
        if "expert_parameters" in settings:
            return int(settings["expert_parameters"])
        return 2 * int(settings["d"]) * int(settings["h"])
    except (ValueError, SyntaxError, KeyError, TypeError):
        return None


def _top_k(meta: str) -> int | None:
    """``k``, or ``top_k`` of each layer."""
    try:
        settings = ast.literal_eval(meta)
        of_layers = settings["top_k"] if "top_k" in settings else settings["k"]
        numbers = {int(number) for number in (of_layers if isinstance(of_layers, list) else [of_layers])}
    except (ValueError, SyntaxError, KeyError, TypeError):
        return None
    return numbers.pop() if len(numbers) == 1 else None
