"""The islands of one host: ranks joined pairwise by the host's fastest family of links. Pure.

NVLink is not transitive: in a cube mesh of eight V100 every GPU reaches every other one over NVLinks, but has links to
four of them only. So an island is a clique of the links, and the islands of a host part its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final

from ds_hybrid.topology.links import PCIE_KINDS, SELF, UNKNOWN, family, slowness

NUMA_NODE: Final = "NUMA"
WHOLE_HOST: Final = "host"

_JOINS_NOTHING: Final = (PCIE_KINDS[-1], UNKNOWN, SELF)

Ranks = tuple[int, ...]


def find_islands(links: Sequence[Sequence[str]], numa_nodes: Sequence[int | None]) -> tuple[str, tuple[Ranks, ...]]:
    """Part the n ranks of a host into islands.

    The fastest family of links joins them, all counts of NVLinks being one. Where no link is better than SYS, the NUMA
    nodes are the islands if all are known and differ, else the whole host is.

    Args:
        links: [n, n] kinds of link, symmetric.
        numa_nodes: [n], None where unknown.

    Returns:
        What joins an island (a family of links, NUMA_NODE or WHOLE_HOST), and the islands: indices 0 to n-1, ascending,
        in the order of their first. A connected set that is no clique becomes few cliques, of one size if that takes
        no more of them than to split off the largest clique again and again.
    """
    everyone = range(len(links))
    families = {family(kind) for row in links for kind in row}.difference(_JOINS_NOTHING)
    if families:
        fastest = min(families, key=slowness)
        joined = {
            one: frozenset(other for other in everyone if other != one and family(links[one][other]) == fastest)
            for one in everyone
        }
        return fastest, tuple(sorted(clique for part in _components(joined) for clique in _cover(part, joined)))
    known = {node for node in numa_nodes if node is not None}
    if len(known) > 1 and None not in numa_nodes:
        nodes = (tuple(one for one in everyone if numa_nodes[one] == node) for node in known)
        return NUMA_NODE, tuple(sorted(nodes))
    return WHOLE_HOST, (tuple(everyone),)


_Joined = Mapping[int, frozenset[int]]  # to which others each one has a link of the fastest family


def _components(joined: _Joined) -> Iterator[Ranks]:
    left = set(joined)
    while left:
        part, edge = set[int](), {min(left)}
        while edge:
            part |= edge
            edge = {other for one in edge for other in joined[one]} - part
        left -= part
        yield tuple(sorted(part))


def _cover(part: Ranks, joined: _Joined) -> list[Ranks]:
    """Part a connected set into cliques: equal ones if those are not more than the largest taken again and again."""
    largest_first, left = [], part
    while left:
        clique = next(clique for size in range(len(left), 0, -1) for clique in _cliques(left, size, joined))
        largest_first.append(clique)
        left = tuple(one for one in left if one not in clique)
    for num_cliques in range(2, len(largest_first) + 1):
        if len(part) % num_cliques == 0:
            equal = _equal_cover(part, len(part) // num_cliques, joined)
            if equal is not None and not any(_are_one(one, other, joined) for one, other in combinations(equal, 2)):
                return equal
    return largest_first


def _equal_cover(part: Ranks, size: int, joined: _Joined) -> list[Ranks] | None:
    """Part a set into cliques of one size, if that can be done."""
    if not part:
        return []
    for clique in _cliques(part, size, joined):
        if clique[0] != part[0]:
            return None
        rest = _equal_cover(tuple(one for one in part if one not in clique), size, joined)
        if rest is not None:
            return [clique, *rest]
    return None


def _are_one(clique: Ranks, other: Ranks, joined: _Joined) -> bool:
    """Whether two cliques together are one."""
    return all(joined[one].issuperset(other) for one in clique)


def _cliques(part: Ranks, size: int, joined: _Joined) -> Iterator[Ranks]:
    """The cliques of ``size`` members of ``part``, in lexicographic order."""
    if size == 0:
        yield ()
        return
    for place, one in enumerate(part[: len(part) - size + 1]):
        friends = tuple(other for other in part[place + 1 :] if other in joined[one])
        for others in _cliques(friends, size - 1, joined):
            yield (one, *others)
