"""Bytes that really leave a rank: of all collectives, and of the MoE layers by their own meters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

UNCOUNTED = (
    *("all_gather", "all_gather_coalesced", "all_reduce_coalesced", "all_to_all", "reduce_scatter"),
    *("broadcast", "gather", "reduce", "scatter", "send", "isend", "batch_isend_irecv"),
)
"""What else sends, of torch.distributed; everything else is built on one of these or of the counted ones."""


@contextmanager
def counted_collectives() -> Iterator[list[int]]:
    """Note the bytes of each message that this rank sends to others while open, whoever calls torch.distributed.

    Raises:
        AssertionError: something is sent in a way that is not counted.
    """
    sent: list[int] = []

    def all_to_all(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        **_: Any,
    ) -> None:
        size, me = dist.get_world_size(group), dist.get_rank(group)
        elements = input.numel() // size * (size - 1)
        if input_split_sizes:
            per_row = input[0].numel() if len(input) else 0
            elements = per_row * (sum(input_split_sizes) - input_split_sizes[me])
        sent.append(elements * input.element_size())

    def all_gather(output: Any, input: Any, group: Any = None, *_: Any, **__: Any) -> None:
        sent.append(input.numel() * input.element_size() * (dist.get_world_size(group) - 1))

    def all_reduce(tensor: Any, op: Any = None, group: Any = None, *_: Any, **__: Any) -> None:
        size = dist.get_world_size(group)
        sent.append(2 * tensor.numel() * tensor.element_size() * (size - 1) // size)

    def reduce_scatter(output: Any, input: Any, op: Any = None, group: Any = None, *_: Any, **__: Any) -> None:
        size = dist.get_world_size(group)
        sent.append(input.numel() * input.element_size() * (size - 1) // size)

    def refuse(name: str) -> Any:
        def raises(*_: Any, **__: Any) -> None:
            raise AssertionError(f"torch.distributed.{name} sends bytes that nobody counts here")

        return raises

    originals = {}
    wrapped_names = {
        **{name: refuse(name) for name in UNCOUNTED},
        "all_to_all_single": all_to_all,
        "all_gather_single": all_gather,
        "all_reduce": all_reduce,
        "reduce_scatter_single": reduce_scatter,
    }
    for name, noted in wrapped_names.items():
        originals[name] = getattr(distributed_c10d, name)

        def wrapped(*args: Any, _noted: Any = noted, _original: Any = originals[name], **kwargs: Any) -> Any:
            _noted(*args, **kwargs)
            return _original(*args, **kwargs)

        setattr(distributed_c10d, name, wrapped)
        setattr(dist, name, wrapped)
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(distributed_c10d, name, original)
            setattr(dist, name, original)


def dispatched(engine: Any) -> int:
    """Bytes that this rank's MoE layers have sent until now."""
    totals = [layer.meter.total() for layer in engine.module.modules() if hasattr(layer, "meter")]
    return sum(total.payload + total.metadata for total in totals)
