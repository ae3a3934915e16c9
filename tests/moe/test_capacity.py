"""Capacities and queues, on cases that can be worked out by hand."""

from __future__ import annotations

import pytest
import torch

from ds_hybrid.moe.capacity import Capacity, DropPolicy, places_in_expert


@pytest.mark.parametrize(
    ("num_tokens", "factor", "minimum", "expected"),
    [(16, 0.5, 0, 2), (16, 0.5, 4, 4), (10, 1.1, 0, 3), (40, 1.1, 0, 11), (3, 1.0, 0, 1), (0, 1.0, 4, 4)],
)
def test_limit(num_tokens: int, factor: float, minimum: int, expected: int) -> None:
    """40 tokens on 4 experts times 1.1 are 11; in floating point they are 11.000000000000002."""
    capacity = Capacity(factor, 9.0, minimum, "position")
    assert int(capacity.limit(torch.tensor(num_tokens), top_k=1, num_experts=4, training=True)) == expected


def test_evaluation_has_its_own_factor() -> None:
    capacity = Capacity(1.0, 2.0, 0, "position")
    limits = [int(capacity.limit(torch.tensor(8), top_k=2, num_experts=4, training=t)) for t in (True, False)]
    assert limits == [4, 8]


def test_places_are_by_priority_then_token() -> None:
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [2, 0]])
    priority = torch.tensor([[0.5, 0.1], [0.9, 0.0], [0.5, 0.2], [0.0, 0.7]])
    assert places_in_expert(ids, priority, 3).tolist() == [[2, 1], [0, 0], [3, 0], [1, 1]]
    assert places_in_expert(ids, torch.zeros(4, 2), 3).tolist() == [[0, 0], [1, 0], [2, 1], [1, 3]]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("position", [True, True, False, False]), ("probability", [False, True, False, True])],
)
def test_who_stays(policy: DropPolicy, expected: list[bool]) -> None:
    capacity = Capacity(0.5, 0.5, 2, policy)
    scores = torch.tensor([[0.1], [0.4], [0.2], [0.3]])
    kept = capacity.keeps(torch.zeros(4, 1, dtype=torch.int64), scores, None, num_experts=2, training=True)
    assert kept[:, 0].tolist() == expected


def test_random_policy_keeps_as_many_and_is_by_position_in_evaluation() -> None:
    capacity = Capacity(0.5, 0.5, 0, "random")
    ids, scores = torch.zeros(64, 1, dtype=torch.int64), torch.rand(64, 1)
    torch.manual_seed(0)
    draws = [capacity.keeps(ids, scores, None, num_experts=2, training=True) for _ in range(2)]
    assert [int(kept.sum()) for kept in draws] == [16, 16]
    assert not torch.equal(*draws)
    evaluated = capacity.keeps(ids, scores, None, num_experts=2, training=False)
    assert evaluated[:, 0].tolist() == [True] * 16 + [False] * 48


def test_masked_tokens_take_no_place_and_make_no_room() -> None:
    capacity = Capacity(1.0, 1.0, 0, "position")
    is_used = torch.tensor([False, True, True, False, True])
    kept = capacity.keeps(torch.zeros(5, 1, dtype=torch.int64), torch.rand(5, 1), is_used, num_experts=2, training=True)
    assert kept[:, 0].tolist() == [False, True, True, False, False]
