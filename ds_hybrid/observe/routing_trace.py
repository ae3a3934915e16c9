"""Writes how many (token, choice) pairs each expert got, for each step and layer: numbered .npz files in a folder.

A file is written aside and then takes its name, so whoever reads finds whole files, and a crash loses at most what was
not handed over. :func:`ds_hybrid.rebalance.trace.read_trace` reads them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_hybrid.rebalance.trace import PART_NAME, PARTS_FOLDER, part_number

_PART_BYTES = 1 << 20
"""Before compression. A file that has fewer is written anew with what comes."""


class RoutingTraceWriter:
    """Appends to the trace of a run's directory.

    Args:
        layers: their names, which are kept with the counts.
        facts: of the model, likewise, such as top_k.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, run_directory: str | Path, layers: Sequence[str], facts: Mapping[str, Any]) -> None:
        self._folder = Path(run_directory, PARTS_FOLDER)
        self._folder.mkdir(exist_ok=True)
        self._layers = np.array(layers)
        self._facts = repr(dict(facts))
        self._number = 1 + max((part_number(path) or 0 for path in self._folder.iterdir()), default=0)
        self._steps: list[int] = []
        self._counts: list[npt.NDArray[np.uint32]] = []
        probe = self._folder / ".writable"
        probe.touch()
        probe.unlink()

    def append(self, steps: Sequence[int], counts: npt.NDArray[np.int64]) -> None:
        """Note optimizer steps and their counts [steps, L, E].

        Raises:
            OSError: the disk is full, or the like.
        """
        if not len(steps):
            return
        self._steps += steps
        self._counts.append(counts.astype(np.uint32))
        self._write()
        if sum(part.nbytes for part in self._counts) >= _PART_BYTES:
            self.begin_part()

    def begin_part(self) -> None:
        """Let what follows come in a file of its own: a step that is there already comes again."""
        if self._steps:
            self._number += 1
            self._steps, self._counts = [], []

    def _write(self) -> None:
        path = self._folder / PART_NAME.format(self._number)
        aside = path.with_name(f".{path.name}.tmp")
        with aside.open("wb") as file:
            np.savez_compressed(
                file,
                counts=np.concatenate(self._counts),
                steps=np.array(self._steps),
                layers=self._layers,
                meta=np.array(self._facts),
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
