"""The kinds of link between two ranks, in nvidia-smi's words, and what is known of their speed. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

SELF: Final = "X"
"""A rank and itself."""

UNKNOWN: Final = "HOST"
"""Two ranks of one host, and nothing more is known. Not a word of nvidia-smi."""

NETWORK: Final = "NET"
"""Two ranks of different hosts. Not a word of nvidia-smi."""

PCIE_KINDS: Final = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""From one PCIe bridge between the two (PIX) to a path through two NUMA nodes (SYS): nearest first."""

_ORDER: Final = (SELF, "NVLink", *PCIE_KINDS, UNKNOWN, NETWORK)


@dataclass(frozen=True)
class LinkSpeed:
    """What one kind of link does. ``None`` where nobody has measured or told it.

    Attributes:
        bytes_per_second: bandwidth of one direction.
        latency_seconds: time of the smallest message.
    """

    bytes_per_second: float | None = None
    latency_seconds: float | None = None


def is_link_kind(word: str) -> bool:
    """Whether ``word`` names a link between two ranks: NV and a count, one of ``PCIE_KINDS``, UNKNOWN or NETWORK."""
    return num_nvlinks(word) > 0 or word in _ORDER[2:]


def num_nvlinks(kind: str) -> int:
    """Bonded NVLinks of a link such as NV12; 0 for every other kind."""
    match = re.fullmatch(r"NV([1-9][0-9]*)", kind, re.ASCII)
    return int(match[1]) if match else 0


def family(kind: str) -> str:
    """``kind`` itself, but "NVLink" for any number of NVLinks.

    What two ranks gain by NVLink over PCIe is far more than what they gain by a second NVLink. So NV1 and NV2 are one
    family when islands are formed; the count remains in ``Cluster.link``.
    """
    return "NVLink" if num_nvlinks(kind) else kind


def slowness(kind: str) -> tuple[int, int]:
    """A key that sorts kinds from the fastest to the slowest."""
    return _ORDER.index(family(kind)), -num_nvlinks(kind)
