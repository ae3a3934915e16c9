"""Rounds bring every expert to its rank, each of them a valid placement that asks little of any rank."""

from __future__ import annotations

import numpy as np
import pytest

from ds_hybrid.errors import PlacementError
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.rounds import Move, plan_rounds


def random_placement(num_experts: int, num_ranks: int, seed: int) -> ExpertPlacement:
    order = np.random.default_rng(seed).permutation(num_experts)
    return ExpertPlacement.from_slots(order.reshape(num_ranks, -1))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num_experts", "num_ranks"), [(4, 1), (4, 2), (4, 4), (12, 3), (32, 8), (256, 16)])
def test_every_expert_comes_to_its_rank(num_experts: int, num_ranks: int, seed: int) -> None:
    current = random_placement(num_experts, num_ranks, seed)
    target = random_placement(num_experts, num_ranks, 100 + seed)
    moving = np.flatnonzero(current.rank_of_expert != target.rank_of_expert).tolist()
    before, moved = current, []
    for planned in plan_rounds(current, target):
        sources, targets = ([place[0] for place in places] for places in zip(*ends(planned.moves), strict=True))
        assert len(set(sources)) == len(sources)
        assert sorted(sources) == sorted(targets)
        for move in planned.moves:
            expert = move.expert
            assert move.source == (before.rank_of_expert[expert], before.slot_of_expert[expert])
            assert move.target == (planned.placement.rank_of_expert[expert], planned.placement.slot_of_expert[expert])
            assert move.target[0] == target.rank_of_expert[expert]
            assert move.source[0] != move.target[0]
        moved += [move.expert for move in planned.moves]
        stays = np.setdiff1d(np.arange(num_experts), [move.expert for move in planned.moves])
        assert (planned.placement.slot_of_expert[stays] == before.slot_of_expert[stays]).all()
        assert (planned.placement.rank_of_expert[stays] == before.rank_of_expert[stays]).all()
        before = planned.placement
    assert sorted(moved) == moving
    assert (before.rank_of_expert == target.rank_of_expert).all()


def ends(moves: tuple[Move, ...]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [(move.source, move.target) for move in moves]


def test_an_exchange_is_one_round_and_a_ring_another() -> None:
    """Experts 0 and 2 change places; then 1, 3 and 5 go round, and the pair of 6 and 4 shares the first round."""
    current = ExpertPlacement.from_slots([[0, 1], [2, 3], [4, 5], [6, 7]])
    target = ExpertPlacement.from_slots([[2, 5], [0, 1], [6, 3], [4, 7]])
    first, second = plan_rounds(current, target)
    assert first.placement.expert_of_slot.tolist() == [[2, 1], [0, 3], [6, 5], [4, 7]]
    assert [move.expert for move in first.moves] == [0, 2, 4, 6]
    assert second.placement.expert_of_slot.tolist() == [[2, 5], [0, 1], [6, 3], [4, 7]]
    assert [(move.expert, move.target) for move in second.moves] == [(1, (1, 1)), (3, (2, 1)), (5, (0, 1))]


def test_nothing_moves_for_another_order_on_a_rank() -> None:
    current = ExpertPlacement.from_slots([[0, 1], [2, 3]])
    assert plan_rounds(current, ExpertPlacement.from_slots([[1, 0], [3, 2]])) == ()


def test_random_permutations_take_few_more_rounds_than_the_busiest_rank_has_moves() -> None:
    for seed in range(10):
        current, target = random_placement(64, 8, seed), random_placement(64, 8, 100 + seed)
        leaving = np.bincount(current.rank_of_expert[current.rank_of_expert != target.rank_of_expert], minlength=8)
        assert leaving.max() <= len(plan_rounds(current, target)) <= 1.75 * leaving.max()


def test_other_sizes_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"cannot move from 2 ranks x 2 slots to 4 x 1\."):
        plan_rounds(ExpertPlacement.contiguous(4, 2), ExpertPlacement.contiguous(4, 4))
