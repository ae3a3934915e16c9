"""What is sent is what the receivers lack, wherever the replicas' shares begin and end: carried out on arrays."""

from __future__ import annotations

import numpy as np
import pytest

from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.rounds import plan_rounds
from ds_hybrid.rebalance.transfers import Extent, Holding, bytes_of_state, transfers_of

LENGTH = 10
"""Elements of an expert's one tensor."""
WHOLE, SHARED = (0, "weights"), (0, "master")
NUM_PLACES, NUM_SLOTS = 3, 2


def holdings(num_replicas: int) -> list[Holding]:
    """Weights whole on every replica, masters cut at the same distances through all slots of a place."""
    total = NUM_SLOTS * LENGTH
    size = -(-total // num_replicas)
    found = []
    for replica in range(num_replicas):
        of_slot: dict[int, dict[tuple[int, str], Extent]] = {}
        for slot in range(NUM_SLOTS):
            first, last = (min(max(edge - slot * LENGTH, 0), LENGTH) for edge in (replica * size, (replica + 1) * size))
            of_slot[slot] = {WHOLE: Extent((0, LENGTH), 2)}
            if first < last:
                of_slot[slot][SHARED] = Extent((first, last), 4)
        found.append(of_slot)
    return found


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7])
def test_every_rank_ends_with_its_part_of_the_new_expert(num_replicas: int) -> None:
    held = holdings(num_replicas)
    grid = [[10 * replica + place for place in range(NUM_PLACES)] for replica in range(num_replicas)]
    current = ExpertPlacement.from_slots([[0, 1], [2, 3], [4, 5]])
    (planned,) = plan_rounds(current, ExpertPlacement.from_slots([[0, 5], [1, 3], [4, 2]]))
    memory = {
        (rank, slot, part): np.full(LENGTH, np.nan)
        for ranks in grid
        for rank in ranks
        for slot in range(NUM_SLOTS)
        for part in (WHOLE, SHARED)
    }

    def fill(replica: int, place: int, placement: ExpertPlacement, into: dict[tuple[int, int, object], object]) -> None:
        for slot, parts in held[replica].items():
            for part, extent in parts.items():
                values = np.full(LENGTH, np.nan)
                span = slice(*extent.span)
                values[span] = 100 * placement.expert_of_slot[place, slot] + np.arange(LENGTH)[span]
                into[grid[replica][place], slot, part] = values

    expected = dict(memory)
    for replica in range(num_replicas):
        for place in range(NUM_PLACES):
            fill(replica, place, current, memory)
            fill(replica, place, planned.placement, expected)

    transfers = list(transfers_of(planned, held, grid))
    staged = [memory[one.source, one.move.source[1], one.part][slice(*one.span)].copy() for one in transfers]
    for one, values in zip(transfers, staged, strict=True):
        assert not np.isnan(values).any(), "a rank sends what it has not"
        memory[one.target, one.move.target[1], one.part][slice(*one.span)] = values
    for key, values in expected.items():
        np.testing.assert_array_equal(memory[key], values)

    received = sum(one.num_bytes for one in transfers)
    # A rank gets what it holds of the slot, whoever comes there, and no byte of it twice.
    assert received == sum(
        bytes_of_state(held[replica], move.target[1]) for move in planned.moves for replica in range(num_replicas)
    )
    assert received == 3 * (num_replicas * 2 * LENGTH + 4 * LENGTH)
    of_ranks = [list(transfers_of(planned, held, grid, rank=rank)) for ranks in grid for rank in ranks]
    assert sum(map(len, of_ranks)) == 2 * len(transfers)  # each once at its source and once at its target


def test_weights_come_from_the_replica_of_the_same_number() -> None:
    grid = [[0, 1], [2, 3]]
    (planned,) = plan_rounds(ExpertPlacement.contiguous(4, 2), ExpertPlacement.from_slots([[0, 2], [1, 3]]))
    weights = [one for one in transfers_of(planned, holdings(2), grid) if one.part == WHOLE]
    assert sorted((one.source, one.target) for one in weights) == [(0, 1), (1, 0), (2, 3), (3, 2)]
