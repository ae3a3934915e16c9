"""The words of links, from the fastest to the slowest."""

from __future__ import annotations

import pytest

from ds_hybrid.topology.links import NETWORK, UNKNOWN, family, is_link_kind, num_nvlinks, slowness


def test_order_from_the_fastest() -> None:
    fastest_first = ["NV18", "NV2", "NV1", "PIX", "PXB", "PHB", "NODE", "SYS", UNKNOWN, NETWORK]
    assert sorted(set(fastest_first), key=slowness) == fastest_first
    assert all(is_link_kind(kind) for kind in fastest_first)


@pytest.mark.parametrize("word", ["X", "NV", "NV0", "NV#", "nv4", "NV4 ", "NVLink", "SOC", "N/A", ""])
def test_what_is_no_link(word: str) -> None:
    assert not is_link_kind(word)


@pytest.mark.parametrize(("kind", "count", "name"), [("NV12", 12, "NVLink"), ("NV1", 1, "NVLink"), ("PIX", 0, "PIX")])
def test_every_number_of_nvlinks_is_one_family(kind: str, count: int, name: str) -> None:
    assert (num_nvlinks(kind), family(kind)) == (count, name)
