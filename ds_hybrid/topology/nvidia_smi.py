"""The text of ``nvidia-smi topo -m`` or ``-mp`` -> link table. Pure.

Names come from the labels of the rows: the header has names with blanks in them, is wrapped in escape codes even when
piped, and loses its separators in some pasted copies. Cells are told apart by their words, because pasted copies glue
them together. Pasted copies also have blanks where nvidia-smi writes tabs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ds_hybrid.errors import TopologyError
from ds_hybrid.problems import Problem
from ds_hybrid.topology.links import PCIE_KINDS, SELF

_ESCAPE_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CELL = re.compile(rf"\s*({SELF}|NV[1-9][0-9]*|{'|'.join(PCIE_KINDS)})", re.ASCII)
_GPU = re.compile(r"\s*GPU[0-9]")
_AFFINITIES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_SAVE_IT = "Save it with: nvidia-smi topo -m > FILE."


@dataclass(frozen=True)
class LinkTable:
    """What nvidia-smi says of one host: G GPUs and C network cards.

    Attributes:
        gpus: names of the GPUs, [G], such as GPU0.
        nics: names of the network cards, [C], such as NIC0 or mlx5_0.
        cells: [G + C, G + C]. The link between two of (*gpus, *nics): NV12, PIX, PXB, PHB, NODE, SYS, X for itself.
        numa_affinity: the NUMA nodes next to each GPU, [G], as text; None where the driver does not tell.
    """

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    numa_affinity: tuple[str, ...] | None

    def links_of(self, gpu: int) -> tuple[str, ...]:
        """The link from a GPU, by its index, to each GPU: [G]."""
        return self.cells[gpu][: len(self.gpus)]

    def numa_node_of(self, gpu: int) -> int | None:
        """The NUMA node of a GPU, by its index, or None when it is not told or when it is a range such as "0-1".

        In a list such as "0,3-9" the first is the node; the others are memories of GPUs (Grace machines).
        """
        text = self.numa_affinity[gpu] if self.numa_affinity else ""
        match = re.match(r"([0-9]+)(,|$)", text, re.ASCII)
        return int(match[1]) if match else None


def parse_topo(text: str, *, name: str = "nvidia-smi topo") -> LinkTable:
    """The table in ``text``; lines before it are skipped. ``name`` is how messages call the text.

    Raises:
        TopologyError: with the line, its number and what is wrong with it.
    """
    lines = [_Line(number, line, name) for number, line in enumerate(_ESCAPE_CODE.sub("", text).splitlines(), 1)]
    start = next((index for index, line in enumerate(lines) if _GPU.match(line.text)), None)
    if start is None:
        first = next((line for line in lines if line.text.strip()), _Line(1, "", name))
        raise first.error(f"no line with the names of the GPUs follows. {_SAVE_IT}")
    header, rows = lines[start], list(_until_blank(lines[start + 1 :]))
    affinities = _check_header(header, rows)
    names = [row.label for row in rows]
    gpus = tuple(takewhile(_GPU.match, names))
    cells, affinity_rows = [], []
    for place, row in enumerate(rows):
        words, rest = _cells(row, names, place)
        cells.append(words)
        if place < len(gpus):
            affinity_rows.append(_affinity_values(row, rest, affinities))
        elif rest.strip():
            raise row.error(f'"{rest.strip()}" follows the cells, and {row.label} has no affinity. {_SAVE_IT}')
    _check_symmetry(rows, cells)
    columns = dict(zip(affinities, zip(*affinity_rows, strict=True), strict=True))
    return LinkTable(gpus, tuple(names[len(gpus) :]), tuple(cells), columns.get("NUMA Affinity"))


@dataclass(frozen=True)
class _Line:
    number: int
    text: str
    name: str

    @property
    def label(self) -> str:
        return self.text.split()[0]

    def error(self, rule: str) -> TopologyError:
        return TopologyError(Problem(f"line {self.number}", rule, self.text.rstrip()).line(self.name))


def _until_blank(lines: Sequence[_Line]) -> Iterator[_Line]:
    for line in lines:
        if not line.text.strip() or line.text.strip() == "Legend:":
            return
        yield line


def _check_header(header: _Line, rows: Sequence[_Line]) -> list[str]:
    """The affinity columns that the header names, after a column for each row, in the order of the rows."""
    left = _squeezed(header.text)
    for row in rows:
        if not left.startswith(row.label):
            raise row.error(f"{row.label} is not the next column of line {header.number}. {_SAVE_IT}")
        left = left.removeprefix(row.label)
    found = []
    for column in _AFFINITIES:
        if left.startswith(_squeezed(column)):
            found.append(column)
            left = left.removeprefix(_squeezed(column))
    if left or "CPU Affinity" not in found:
        left = left or "no CPU Affinity"
        raise header.error(
            f'ends in "{left}", must end in {", ".join(_AFFINITIES)} after one name for each of the {len(rows)} rows. '
            f"{_SAVE_IT}"
        )
    return found


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _cells(row: _Line, names: Sequence[str], place: int) -> tuple[tuple[str, ...], str]:
    """The links of a row, and the text after them."""
    rest = row.text.lstrip().removeprefix(row.label)
    words = []
    for column, name in enumerate(names):
        match = _CELL.match(rest)
        if match is None:
            word = (rest.split() or [""])[0]
            kinds = ", ".join(("NV#", *PCIE_KINDS))
            raise row.error(f'"{word}" in column {name} must be one of {kinds}. {_SAVE_IT}')
        if (match[1] == SELF) != (column == place):
            raise row.error(f"column {name} is {match[1]}; {SELF} must stand in column {names[place]} alone.")
        words.append(match[1])
        rest = rest[match.end() :]
    return tuple(words), rest


def _affinity_values(row: _Line, rest: str, columns: Sequence[str]) -> list[str]:
    values = rest.split()
    if len(values) == len(columns) - 1 and rest.startswith("\t\t"):
        values = ["", *values]  # in some containers the CPUs are blank
    if len(values) != len(columns):
        raise row.error(f"{len(values)} values follow the cells, must be {len(columns)}: {', '.join(columns)}.")
    return values


def _check_symmetry(rows: Sequence[_Line], cells: Sequence[tuple[str, ...]]) -> None:
    for place, row in enumerate(rows):
        for other in range(place):
            if cells[place][other] != cells[other][place]:
                raise row.error(
                    f"column {rows[other].label} is {cells[place][other]}, but line {rows[other].number} says "
                    f"{cells[other][place]}. Run nvidia-smi again."
                )
