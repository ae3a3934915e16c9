"""A table of numbers as a small picture, one pixel a cell, to go inside a page. Pure.

A colour stands for the square root of a value, so that small ones still differ where few are large. The colours run
from dark blue to light yellow with even steps of lightness, so they keep their order for readers who tell few colours
apart, and in print.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

_STOPS: Final = (
    (13, 29, 83),
    (38, 66, 120),
    (78, 98, 124),
    (118, 128, 122),
    (163, 160, 110),
    (210, 194, 84),
    (255, 230, 60),
)
_LEVELS: Final = 64


def scale_colours(count: int = _LEVELS) -> list[tuple[int, int, int]]:
    """``count`` colours from the lowest value to the highest, each (red, green, blue) of 0 to 255."""
    places = np.linspace(0, len(_STOPS) - 1, count)
    channels = [np.interp(places, range(len(_STOPS)), channel) for channel in zip(*_STOPS, strict=True)]
    return [(round(red), round(green), round(blue)) for red, green, blue in zip(*channels, strict=True)]


def place_of(value: npt.ArrayLike, highest: float) -> npt.NDArray[np.float64]:
    """Of values >= 0 on the scale of colours: 0 for 0, 1 for ``highest`` and above."""
    place: npt.NDArray[np.float64] = np.sqrt(np.minimum(np.asarray(value, dtype=np.float64) / highest, 1.0))
    return place


def levels(cells: npt.NDArray[np.float64], highest: float) -> npt.NDArray[np.uint8]:
    """The colour of each cell: 0 where it is NaN, else 1 for 0 up to 64 for ``highest`` and above."""
    known = np.isfinite(cells)
    scaled = place_of(np.where(known, cells, 0.0), highest) * (_LEVELS - 1)
    return np.where(known, 1 + np.rint(scaled), 0).astype(np.uint8)


def picture(cells: npt.NDArray[np.float64], highest: float) -> str:
    """The ``data:`` address of a PNG of ``cells`` [rows, columns], the first row on top; NaN is transparent."""
    indices = levels(cells, highest)
    rows, columns = indices.shape
    palette = bytes(channel for colour in [(0, 0, 0), *scale_colours()] for channel in colour)
    lines = b"".join(b"\0" + row.tobytes() for row in indices)
    content = (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0))
        + _chunk(b"PLTE", palette)
        + _chunk(b"tRNS", b"\0")
        + _chunk(b"IDAT", zlib.compress(lines, 9))
        + _chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
