"""ExpertPlacement is a bijection, comparable and hashable, and says what is wrong when it is not one."""

from __future__ import annotations

import numpy as np
import pytest

from ds_hybrid.errors import PlacementError
from ds_hybrid.placement import ExpertPlacement


def test_contiguous_is_deepspeeds_layout() -> None:
    placement = ExpertPlacement.contiguous(6, 3)
    assert placement.rank_of_expert.tolist() == [0, 0, 1, 1, 2, 2]
    assert placement.slot_of_expert.tolist() == [0, 1, 0, 1, 0, 1]
    assert (placement.num_experts, placement.num_ranks, placement.num_slots) == (6, 3, 2)


def test_slots_and_experts_are_inverse() -> None:
    order = np.random.default_rng(0).permutation(12).reshape(3, 4)
    placement = ExpertPlacement.from_slots(order)
    assert placement.expert_of_slot.tolist() == order.tolist()
    for expert in range(12):
        assert order[placement.rank_of_expert[expert], placement.slot_of_expert[expert]] == expert


def test_equal_placements_are_one_key() -> None:
    one = ExpertPlacement.contiguous(8, 2)
    same = ExpertPlacement(one.rank_of_expert.tolist(), one.slot_of_expert.tolist())  # type: ignore[arg-type]
    swapped = ExpertPlacement.from_slots([[0, 1, 2, 4], [3, 5, 6, 7]])
    wider = ExpertPlacement.contiguous(8, 4)
    assert one == same
    assert hash(one) == hash(same)
    assert one.digest == same.digest
    assert len({one, same, swapped, wider}) == 3
    assert one != "a placement"
    assert 0 <= one.digest < 2**63


def test_arrays_are_copied_and_read_only() -> None:
    ranks, slots = np.array([0, 1]), np.array([0, 0])
    placement = ExpertPlacement(ranks, slots)
    ranks[0] = 1
    assert placement.rank_of_expert.tolist() == [0, 1]
    for array in (placement.rank_of_expert, placement.slot_of_expert, placement.expert_of_slot):
        with pytest.raises(ValueError, match="read-only"):
            array.flat[0] = 5


@pytest.mark.parametrize(
    ("ranks", "slots", "message"),
    [
        ([0, 0, 1, 1], [0, 0, 0, 1], "slot 0 of rank 0 holds experts [0, 1], must hold exactly one."),
        ([0, 0, 0, 1], [0, 1, 0, 0], "slot 0 of rank 0 holds experts [0, 2], must hold exactly one."),
        ([0, 0, 1], [0, 1, 0], "3 experts on 2 ranks: every rank must hold the same number."),
        (
            [0, 0, 1, 1],
            [0, 1, 0, 2],
            "expert 3 is at rank 1, slot 2; must be a rank of 0 to 1 and a slot of 0 to 1.",
        ),
        (
            [-1, 0, 1, 1],
            [0, 1, 0, 1],
            "expert 0 is at rank -1, slot 0; must be a rank of 0 to 1 and a slot of 0 to 1.",
        ),
        (
            [0, 1],
            [0],
            "rank_of_expert and slot_of_expert have shapes [2] and [1], must both be [number of experts].",
        ),
    ],
)
def test_no_bijection(ranks: list[int], slots: list[int], message: str) -> None:
    with pytest.raises(PlacementError) as error:
        ExpertPlacement(ranks, slots)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_uneven_contiguous_and_broken_slots() -> None:
    with pytest.raises(PlacementError, match="7 experts cannot be spread evenly over 2 ranks"):
        ExpertPlacement.contiguous(7, 2)
    with pytest.raises(PlacementError, match=r"must name each expert 0 to 3 exactly once"):
        ExpertPlacement.from_slots([[0, 1], [1, 3]])
    with pytest.raises(PlacementError, match=r"has shape \[2\], must be \[ranks, slots per rank\]"):
        ExpertPlacement.from_slots([0, 1])
