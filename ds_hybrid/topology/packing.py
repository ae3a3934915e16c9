"""Groups of one size whose ranks are as near to each other as the machines allow. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ds_hybrid.topology.cluster import Cluster
from ds_hybrid.topology.islands import Ranks

Groups = tuple[Ranks, ...]


def pack(items: Sequence[Ranks], num_items: int, cluster: Cluster) -> list[Groups]:
    """Part ``items`` into bundles of ``num_items`` each, which must divide their number.

    An item is the ranks that cannot be parted: a single one, or a TP group. As many bundles as fit are made inside the
    NUMA nodes of an island, then of what is left inside islands, NUMA nodes and hosts. A set of n items that such a
    place holds whole thus gives n // num_items bundles in the place. The last ones span hosts: with equal shares of
    each of their hosts, as large as can be, if the numbers allow.

    Returns:
        Bundles and the items in them, in no special order.
    """
    runs: list[Groups] = [(item,) for item in items]  # to be kept together where possible
    bundles: list[Groups] = []
    for place_of_rank in _places(cluster):
        left: list[Groups] = []
        runs_at: dict[Hashable, list[Groups]] = {}
        for run in runs:
            places = {place_of_rank[rank] for item in run for rank in item}
            if len(places) == 1:
                runs_at.setdefault(places.pop(), []).append(run)
            else:
                left.append(run)
        for here in runs_at.values():
            made, rest = _fill(here, num_items)
            bundles += made
            left += [rest] if rest else []
        runs = left
    bundles += _equal_shares(runs, num_items) or _fill(runs, num_items)[0]
    assert len(bundles) * num_items == len(items), (len(items), num_items)
    return bundles


def _places(cluster: Cluster) -> Sequence[Sequence[Hashable]]:
    """For each kind of place, from the smallest to the largest, the place of every rank."""
    islands, hosts, nodes = cluster.island_of_rank, cluster.host_of_rank, cluster.numa_node_of_rank
    return (
        tuple(zip(islands, nodes, strict=True)),
        islands,
        tuple(zip(hosts, nodes, strict=True)),
        hosts,
    )


def _fill(runs: Sequence[Groups], num_items: int) -> tuple[list[Groups], Groups]:
    """Bundles out of whole runs, the longest first; only where none fits is the shortest one cut. And what is left."""
    left = list(runs)
    bundles = []
    while sum(map(len, left)) >= num_items:
        bundle: Groups = ()
        for run in sorted(left, key=len, reverse=True):
            if len(bundle) + len(run) <= num_items:
                bundle += run
                left.remove(run)
        if num_missing := num_items - len(bundle):
            shortest = min(left, key=len)
            bundle += shortest[:num_missing]
            left[left.index(shortest)] = shortest[num_missing:]
        bundles.append(bundle)
    return bundles, tuple(item for run in left for item in run)


def _equal_shares(runs: Sequence[Groups], num_items: int) -> list[Groups] | None:
    """Bundles with the same number of items of each of their runs, or None where the lengths of the runs forbid it."""
    num_bundles = sum(map(len, runs)) // num_items
    for share in range(num_items, 0, -1):
        if num_items % share or any(len(run) % share or len(run) // share > num_bundles for run in runs):
            continue
        left = list(runs)
        bundles = []
        for _ in range(num_bundles):
            # Always from the runs with most left: then none is left with more shares than there are bundles to come.
            chosen = sorted(range(len(left)), key=lambda place: -len(left[place]))[: num_items // share]
            bundles.append(tuple(item for place in chosen for item in left[place][:share]))
            for place in chosen:
                left[place] = left[place][share:]
        return bundles
    return None
