"""From one placement to another in rounds, each of which ends in a valid placement. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from ds_hybrid.errors import PlacementError
from ds_hybrid.placement import ExpertPlacement

Place = tuple[int, int]
"""A rank of the expert-parallel group, and a slot on it."""


@dataclass(frozen=True)
class Move:
    """One expert's way between two different ranks."""

    expert: int
    source: Place
    target: Place


@dataclass(frozen=True)
class Round:
    """Moves that happen at once: each rank that takes part gives one expert away and gets another in its slot.

    Attributes:
        placement: where all experts are afterwards.
    """

    moves: tuple[Move, ...]
    placement: ExpertPlacement


def plan_rounds(current: ExpertPlacement, target: ExpertPlacement) -> tuple[Round, ...]:
    """Bring every expert to its rank in ``target``; no expert moves twice, and none moves within its rank.

    The slots are chosen here: an expert takes the slot of the one that leaves in the same round. So the last round's
    placement has the ranks of ``target``, and may have other slots.

    Every rank gets as many experts as it gives, so the moves fall into cycles of ranks; pairs that just exchange come
    first. Cycles without a common rank share a round.

    Raises:
        PlacementError: the placements are of different experts or ranks.
    """
    shapes = [(one.num_ranks, one.num_slots) for one in (current, target)]
    if shapes[0] != shapes[1]:
        raise PlacementError(
            f"experts cannot move from {shapes[0][0]} ranks x {shapes[0][1]} slots to {shapes[1][0]} x {shapes[1][1]}."
        )
    cycles_of_round: list[list[tuple[int, ...]]] = []
    busy_in_round: list[set[int]] = []
    for cycle in _cycles(current, target):
        ranks = {int(current.rank_of_expert[expert]) for expert in cycle}
        number = next((n for n, busy in enumerate(busy_in_round) if not busy & ranks), len(busy_in_round))
        if number == len(busy_in_round):
            cycles_of_round.append([])
            busy_in_round.append(set())
        cycles_of_round[number].append(cycle)
        busy_in_round[number] |= ranks
    planned = []
    placement = current
    for cycles in cycles_of_round:
        moves = tuple(move for cycle in cycles for move in _moves(cycle, placement))
        placement = _after(placement, moves)
        planned.append(Round(moves, placement))
    return tuple(planned)


def _cycles(current: ExpertPlacement, target: ExpertPlacement) -> Iterator[tuple[int, ...]]:
    """Every moving expert once, in cycles: each goes to the rank that the next one leaves, the last to the first's."""
    leaving: dict[int, dict[int, deque[int]]] = defaultdict(lambda: defaultdict(deque))
    for expert in range(current.num_experts):
        source, goal = int(current.rank_of_expert[expert]), int(target.rank_of_expert[expert])
        if source != goal:
            leaving[source][goal].append(expert)
    for one in sorted(leaving):
        for other in sorted(leaving[one]):
            while one < other and leaving[one][other] and leaving[other][one]:
                yield leaving[one][other].popleft(), leaving[other][one].popleft()
    for start in sorted(leaving):
        while any(leaving[start].values()):
            yield from _walk_home(start, leaving)


def _walk_home(start: int, leaving: dict[int, dict[int, deque[int]]]) -> Iterator[tuple[int, ...]]:
    """Leave ``start`` with an expert and go on until all ranks on the way are closed cycles."""
    ranks, experts = [start], []
    while True:
        goal = min(rank for rank, waiting in leaving[ranks[-1]].items() if waiting)
        experts.append(leaving[ranks[-1]][goal].popleft())
        if goal not in ranks:
            ranks.append(goal)
            continue
        first = ranks.index(goal)
        yield tuple(experts[first:])
        del ranks[first + 1 :], experts[first:]
        if not experts:
            return


def _moves(cycle: tuple[int, ...], placement: ExpertPlacement) -> Iterator[Move]:
    places = [(int(placement.rank_of_expert[expert]), int(placement.slot_of_expert[expert])) for expert in cycle]
    for expert, source, target in zip(cycle, places, places[1:] + places[:1], strict=True):
        yield Move(expert, source, target)


def _after(placement: ExpertPlacement, moves: tuple[Move, ...]) -> ExpertPlacement:
    expert_of_slot = placement.expert_of_slot.copy()
    for move in moves:
        expert_of_slot[move.target] = move.expert
    return ExpertPlacement.from_slots(expert_of_slot)
