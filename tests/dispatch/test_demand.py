"""What is counted of a routing equals counting token by token, and totals start anew."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
import torch

from ds_hybrid.dispatch.demand import DemandTotal, demand_of


@dataclass(frozen=True)
class Case:
    """``node_of_rank`` is empty where the nodes are not known."""

    num_tokens: int
    num_ranks: int
    top_k: int
    node_of_rank: tuple[int, ...] = ()


CASES = {
    "no nodes": Case(40, 4, 3),
    "two nodes": Case(40, 4, 3, (0, 1, 1, 0)),
    "every rank a node": Case(25, 3, 2, (2, 0, 1)),
    "one node": Case(25, 3, 2, (0, 0, 0)),
    "more choices than ranks": Case(30, 2, 6, (0, 1)),
    "top-1": Case(17, 8, 1, (0, 0, 1, 1, 2, 2, 3, 3)),
    "one rank": Case(9, 1, 2),
    "no token": Case(0, 4, 2, (0, 0, 1, 1)),
}


def draw(case: Case, seed: int = 0) -> np.ndarray:
    """[T, K], the rank of each choice."""
    return np.random.default_rng(seed).integers(case.num_ranks, size=(case.num_tokens, case.top_k))


def brute_force(case: Case, choices: np.ndarray) -> tuple[list[int], list[int], list[int]]:
    """Pairs, rows and rows to nodes, one token after the other."""
    pairs, rows = [0] * case.num_ranks, [0] * case.num_ranks
    to_node = [0] * (case.num_ranks if case.node_of_rank else 0)
    for token in choices.tolist():
        for rank in token:
            pairs[rank] += 1
        for rank in set(token):
            rows[rank] += 1
        for node in {case.node_of_rank[rank] for rank in token} if to_node else ():
            to_node[node] += 1
    return pairs, rows, to_node


@pytest.mark.parametrize("name", CASES)
def test_demand_equals_brute_force(name: str) -> None:
    case = CASES[name]
    choices = draw(case)
    nodes = torch.tensor(case.node_of_rank) if case.node_of_rank else None
    demand = demand_of(torch.from_numpy(choices), num_ranks=case.num_ranks, node_of_rank=nodes)
    assert (demand.pairs.tolist(), demand.rows.tolist(), demand.rows_to_node.tolist()) == brute_force(case, choices)


@pytest.mark.parametrize("name", ["no nodes", "two nodes"])
def test_a_total_adds_calls_and_starts_anew(name: str) -> None:
    case, total = CASES[name], DemandTotal()
    nodes = torch.tensor(case.node_of_rank) if case.node_of_rank else None
    calls = [draw(case, seed)[: case.num_tokens - seed] for seed in range(3)]
    assert total.take() is None
    for choices in calls:
        demand = demand_of(torch.from_numpy(choices), num_ranks=case.num_ranks, node_of_rank=nodes)
        total.add(demand, num_tokens=len(choices))
    taken = total.take()
    assert taken is not None
    counts = [[*chain(*brute_force(case, choices))] for choices in calls]
    assert taken.tolist() == [*np.sum(counts, axis=0).tolist(), 40 + 39 + 38, 3]
    assert total.take() is None
