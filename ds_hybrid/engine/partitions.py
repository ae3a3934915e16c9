"""Where ZeRO 1 and 2 keep each parameter in the files of a checkpoint. Pure.

Not by the ``param_slice_mappings`` of those files: with round_robin_gradients, DeepSpeed 0.19.8 writes down the places
of another order than it stores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Run = tuple[int, int]
"""First element and the one after the last, in a rank's flat partition of a parameter group."""


def runs_of_partition(
    shapes: Mapping[str, Sequence[int]], paddings: Sequence[int], *, size: int, part: int, length: int
) -> Iterator[tuple[str, Run]]:
    """Which parameters of a group lie where in one rank's partition.

    The parameters of a group lie one after the other, each followed by its padding, and every rank has an equal part.

    Args:
        shapes: of all parameters of the group, in its order: ``param_shapes`` of the model states.
        paddings: elements after each.
        size: of every part but the last, which may be shorter in the file.
        part: this rank's number among those that share the group.
        length: of its part in the file.
    """
    start = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        end = start + math.prod(shape)
        first, last = max(start - part * size, 0), min(end - part * size, length)
        if first < last:
            yield name, (first, last)
        start = end + padding


def paddings_of_groups(
    optimizer_state: Mapping[str, Any], shapes: Sequence[Mapping[str, Sequence[int]]]
) -> Sequence[Sequence[int]]:
    """The paddings of each group's parameters, as a rank's file has them; none in files that do not tell."""
    paddings: Sequence[Sequence[int]] = optimizer_state.get("param_alignment_paddings") or [
        [0] * len(s) for s in shapes
    ]
    return paddings
