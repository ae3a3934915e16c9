"""Islands of real machines and of graphs that have no cliques for components."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from ds_hybrid.topology.islands import find_islands
from tests.topology.machines import link_table

Islands = tuple[tuple[int, ...], ...]


def links_of(num_ranks: int, joined: set[tuple[int, int]], kind: str = "NV1", other: str = "SYS") -> list[list[str]]:
    """[n, n] links: ``kind`` for the pairs in ``joined``, and ``other`` for the rest."""
    links = [[other] * num_ranks for _ in range(num_ranks)]
    for rank in range(num_ranks):
        links[rank][rank] = "X"
    for one, two in joined:
        links[one][two] = links[two][one] = kind
    return links


def all_but(num_ranks: int, *missing: tuple[int, int]) -> set[tuple[int, int]]:
    return set(combinations(range(num_ranks), 2)).difference(missing)


@pytest.mark.parametrize(
    ("machine", "joined_by", "islands"),
    [
        ("dgx_a100_mlx5_names", "NVLink", (tuple(range(8)),)),
        ("dgx2_16gpu_nv6", "NVLink", (tuple(range(16)),)),
        ("h100_4gpu_nv6_interleaved_cpus", "NVLink", ((0, 1, 2, 3),)),  # a NUMA node each, and all of them joined
        ("a100_pcie_nvlink_bridge_pairs", "NVLink", ((0, 1), (2, 3))),
        ("v100_8gpu_cube_mesh", "NVLink", ((0, 1, 2, 3), (4, 5, 6, 7))),  # not {0, 4}, ... and not one island
        ("b200_one_gpu_lost_nvlink", "NVLink", ((0, 1, 3, 4, 5, 6, 7), (2,))),
        ("rtx4090_8gpu_no_nvlink", "NUMA", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("pcie_6gpu_ansi", "PIX", ((0, 1), (2, 3), (4, 5))),
        ("two_gpu_phb", "PHB", ((0, 1),)),
        ("single_gpu", "host", ((0,),)),
    ],
)
def test_real_machines(machine: str, joined_by: str, islands: Islands) -> None:
    table = link_table(machine)
    gpus = range(len(table.gpus))
    found = find_islands([table.links_of(gpu) for gpu in gpus], [table.numa_node_of(gpu) for gpu in gpus])
    assert found == (joined_by, islands)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((0, 1, 0, 1), ("NUMA", ((0, 2), (1, 3)))),
        ((1, 1, 1, 1), ("host", ((0, 1, 2, 3),))),
        ((0, 0, None, 1), ("host", ((0, 1, 2, 3),))),
        ((None,) * 4, ("host", ((0, 1, 2, 3),))),
    ],
)
@pytest.mark.parametrize("kind", ["SYS", "HOST"])
def test_numa_nodes_where_no_link_is_fast(
    kind: str, nodes: tuple[int | None, ...], expected: tuple[str, Islands]
) -> None:
    assert find_islands(links_of(4, set(), other=kind), nodes) == expected


@pytest.mark.parametrize(
    ("num_ranks", "joined", "islands"),
    [
        (4, {(0, 1), (1, 2), (2, 3), (0, 3)}, ((0, 1), (2, 3))),  # a ring
        (4, {(0, 2), (0, 1), (1, 3)}, ((0, 2), (1, 3))),  # a path, where the first pair is the wrong one
        (4, all_but(4, (0, 1)), ((0, 2), (1, 3))),  # equal ones rather than 3 + 1
        (6, all_but(6, (4, 5), *((one, two) for one in range(4) for two in (4, 5))), ((0, 1, 2, 3), (4,), (5,))),
        (5, all_but(5, (0, 1)), ((0, 2, 3, 4), (1,))),  # five cannot be halved
        (6, all_but(4) | {(3, 4), (4, 5)}, ((0, 1, 2, 3), (4, 5))),  # not three pairs, which are more
        (6, all_but(4) | {(4, 5)}, ((0, 1, 2, 3), (4, 5))),  # cliques of different size stay as they are
        (8, {(one, one ^ 5) for one in range(8)}, ((0, 5), (1, 4), (2, 7), (3, 6))),
    ],
)
def test_sets_that_are_no_cliques(num_ranks: int, joined: set[tuple[int, int]], islands: Islands) -> None:
    assert find_islands(links_of(num_ranks, joined), [None] * num_ranks) == ("NVLink", islands)


def test_two_links_are_no_other_island_than_one() -> None:
    links = links_of(4, all_but(4))
    links[0][1] = links[1][0] = "NV2"
    assert find_islands(links, [None] * 4) == ("NVLink", ((0, 1, 2, 3),))


@pytest.mark.parametrize("seed", range(30))
def test_islands_part_the_ranks_and_are_cliques(seed: int) -> None:
    chance = random.Random(seed)
    num_ranks = chance.randint(2, 12)
    density = chance.random()
    joined = {pair for pair in combinations(range(num_ranks), 2) if chance.random() < density}
    _, islands = find_islands(links_of(num_ranks, joined, kind="PHB"), [None] * num_ranks)
    assert sorted(rank for island in islands for rank in island) == list(range(num_ranks))
    if joined:
        assert all(pair in joined for island in islands for pair in combinations(island, 2))
        for one, other in combinations(islands, 2):  # none of them could be one
            assert not all(tuple(sorted(pair)) in joined for pair in [(a, b) for a in one for b in other])
