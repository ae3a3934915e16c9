"""What ranks must agree on, and every message that tells of a disagreement, whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from ds_hybrid.dispatch.guard import CallFacts, check_agreement, facts_of_call
from ds_hybrid.dispatch.modes import NUM_FACTS, Mode
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.errors import DispatchError
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class Call:
    """What one rank calls a dispatcher with."""

    mode: Mode = "two_stage"
    num_tokens: int = 5
    num_routed: int = 5
    hidden_size: int = 8
    dtype: torch.dtype = torch.float32
    top_k: int = 2
    num_experts: int = 4
    slots: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3))
    shape: tuple[int, ...] = ()
    """Of the tokens, where it is not [num_tokens, hidden_size]."""

    @property
    def placement(self) -> ExpertPlacement:
        return ExpertPlacement.from_slots(self.slots)

    def facts(self) -> CallFacts:
        tokens = torch.zeros(self.shape or (self.num_tokens, self.hidden_size), dtype=self.dtype)
        ids = torch.zeros((self.num_routed, self.top_k), dtype=torch.int64)
        return facts_of_call(self.mode, tokens, Routing(ids, torch.ones(ids.shape), self.num_experts), self.placement)


USUAL = Call()
MOVED = Call(slots=((3, 1), (2, 0)))
SIX = Call(num_experts=6, slots=((0, 1, 2), (3, 4, 5)))

DISAGREEMENTS: dict[str, tuple[Call, str, Any, Any]] = {
    "mode": (Call(mode="hierarchical"), "mode", "two_stage", "hierarchical"),
    "hidden size": (Call(hidden_size=16), "hidden size", 8, 16),
    "dtype": (Call(dtype=torch.bfloat16), "dtype", "torch.float32", "torch.bfloat16"),
    "top-k": (Call(top_k=3), "top-k", 2, 3),
    "experts": (SIX, "number of experts", 4, 6),
    "placement": (MOVED, "placement digest", USUAL.placement.digest, MOVED.placement.digest),
    "two facts: the first is told": (Call(dtype=torch.float64, top_k=3), "dtype", "torch.float32", "torch.float64"),
}

FAULTS = {
    "three dimensions": (
        Call(shape=(5, 1, 8)),
        "tokens are torch.float32 [5, 1, 8], must be floating point [tokens, hidden].",
    ),
    "integers": (Call(dtype=torch.int64), "tokens are torch.int64 [5, 8], must be floating point [tokens, hidden]."),
    "a row of routing too few": (Call(num_routed=4), "5 tokens but 4 rows of routing: must be equal."),
    "another number of experts": (
        Call(num_experts=6),
        "the router chooses among 6 experts, the placement holds 4.",
    ),
}


def message(calls: list[Call], own: int) -> str | None:
    """Of rank ``own``; None where it finds nothing."""
    facts = [call.facts() for call in calls]
    try:
        check_agreement([f.values for f in facts], facts[own], layer="layers.3.mlp")
    except DispatchError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", DISAGREEMENTS)
@pytest.mark.parametrize("rank", [1, 2])
def test_every_rank_raises_the_same_message(name: str, rank: int) -> None:
    other, fact, expected, value = DISAGREEMENTS[name]
    calls = [USUAL] * 3
    calls[rank] = other
    assert [message(calls, own) for own in range(3)] == 3 * [
        f"layers.3.mlp: expert-parallel ranks 0 and {rank} disagree on the {fact}: {expected} and {value}. "
        "Every rank must build the same model from the same ds_config."
    ]


@pytest.mark.parametrize("name", FAULTS)
def test_the_faulty_rank_says_what_and_the_others_who(name: str) -> None:
    faulty, fault = FAULTS[name]
    theirs = "layers.3.mlp: expert-parallel rank 1 was given what it cannot dispatch. Its own message tells what."
    calls = [USUAL, faulty, Call(top_k=3)]  # a fault goes before a disagreement
    assert [message(calls, own) for own in range(3)] == [theirs, f"layers.3.mlp: {fault}", theirs]


def test_tokens_may_differ_in_number() -> None:
    calls = [replace(USUAL, num_tokens=num, num_routed=num) for num in (5, 0, 9)]
    assert [message(calls, own) for own in range(3)] == [None] * 3


@pytest.mark.parametrize("call", [USUAL, Call(num_routed=4)], ids=["usual", "faulty"])
def test_facts_take_the_room_that_the_formulas_count(call: Call) -> None:
    assert len(call.facts().values) == NUM_FACTS
