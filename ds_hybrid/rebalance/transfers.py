"""Which rank sends which elements of an expert to which, when replicas share its state among them. Pure.

The ranks that hold experts form a grid: P places of an expert-parallel group, and at each place D replicas, the
expert-data-parallel ranks. Weights are whole on all D ranks or sharded over them, masters and moments likewise, at
boundaries that need not fall between experts; so an expert that changes its slot may change its boundaries too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_hybrid.rebalance.rounds import Move, Round

Span = tuple[int, int]
"""First element and the one after the last, in a flattened tensor."""

Part = tuple[int, str]
"""The number of a tensor of an expert, and the name of a state of it: "weights", "master", "exp_avg", ..."""


@dataclass(frozen=True)
class Extent:
    """What a rank holds of one part of the expert in one slot.

    Attributes:
        span: in the flattened tensor of that expert.
        value_bytes: of an element.
    """

    span: Span
    value_bytes: int


Holding = Mapping[int, Mapping[Part, Extent]]
"""By slot, what a rank holds of a layer's experts. The same at every place, for the same expert-data-parallel rank."""


@dataclass(frozen=True)
class Transfer:
    """A run of elements on its way.

    Attributes:
        move: whose expert it belongs to.
        source, target: global ranks.
        span: in the flattened tensor of the expert.
    """

    move: Move
    part: Part
    source: int
    target: int
    span: Span
    num_bytes: int


def transfers_of(
    planned: Round, holdings: Sequence[Holding], grid: Sequence[Sequence[int]], *, rank: int | None = None
) -> Iterator[Transfer]:
    """All transfers of a round in one order on every rank; with ``rank``, those that it sends or receives.

    Each receiver takes what its own replica has at the source, and the rest from the replicas after it.

    Args:
        holdings: of each of the D expert-data-parallel ranks.
        grid: [D][P] global ranks: who has which share at which place.
    """
    num_replicas = len(holdings)
    for move in planned.moves:
        (place, slot), (goal, new_slot) = move.source, move.target
        if rank is not None and not any(rank in (ranks[place], ranks[goal]) for ranks in grid):
            continue
        for replica, holding in enumerate(holdings):
            for part, wanted in sorted(holding[new_slot].items()):
                missing = [wanted.span]
                for offset in range(num_replicas):
                    source = (replica + offset) % num_replicas
                    held = holdings[source][slot].get(part)
                    for span in _overlaps(missing, held):
                        one, other = grid[source][place], grid[replica][goal]
                        if rank in (None, one, other):
                            num_bytes = (span[1] - span[0]) * wanted.value_bytes
                            yield Transfer(move, part, one, other, span, num_bytes)
                    missing = _without(missing, held)
                assert not missing, f"nobody holds {missing} of {part} of expert {move.expert}"


def bytes_of_state(holding: Holding, slot: int) -> int:
    """What a rank holds of the expert in a slot."""
    return sum((extent.span[1] - extent.span[0]) * extent.value_bytes for extent in holding[slot].values())


def _overlaps(spans: Sequence[Span], held: Extent | None) -> Iterator[Span]:
    if held is not None:
        for start, stop in spans:
            start, stop = max(start, held.span[0]), min(stop, held.span[1])
            if start < stop:
                yield start, stop


def _without(spans: Sequence[Span], held: Extent | None) -> list[Span]:
    if held is None:
        return list(spans)
    first, last = held.span
    parts = [part for start, stop in spans for part in ((start, min(stop, first)), (max(start, last), stop))]
    return [(start, stop) for start, stop in parts if start < stop]
