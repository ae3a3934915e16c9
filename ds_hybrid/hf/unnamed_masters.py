"""Masters of a 16-bit run without ZeRO: DeepSpeed stores them without names, in the optimizer's order.

Each is found by its value: rounded, it is the weight beside it. Where several weights are equal, order decides.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_hybrid.engine.checkpoint import load_lazily
from ds_hybrid.hf.files import CheckpointFiles
from ds_hybrid.hf.masters import Masters

Weights = Mapping[tuple[str, int], Tensor]
"""By (name, place), as in :class:`Masters`; in the model's order."""


def masters_without_zero(files: CheckpointFiles, weights_of_run: Callable[[], Weights]) -> Masters:
    """Those whose weight is known; none of a run in fp32, whose weights are all there is.

    Args:
        weights_of_run: gives those of the model, in the dtype that it trained in.
    """
    optimizers = {place: load_lazily(path)["optimizer"] or {} for place, path in sorted(files.optimizers.items())}
    if not any(key.startswith("fp32_groups") for optimizer in optimizers.values() for key in optimizer):
        return Masters()
    weights = weights_of_run()
    unmatched: dict[bytes, deque[tuple[str, int]]] = defaultdict(deque)
    for key, weight in weights.items():
        unmatched[_digest(weight)].append(key)
    parts: dict[tuple[str, int], list[Tensor]] = {}
    dtypes = {weight.dtype for weight in weights.values() if weight.is_floating_point()}
    for optimizer in optimizers.values():
        for master in _tensors(optimizer, weights.values()):
            digests = [_digest(master.to(dtype)) for dtype in dtypes]
            found = next((unmatched[digest] for digest in digests if unmatched.get(digest)), None)
            if found:
                parts[found.popleft()] = [master.flatten()]
    return Masters(parts)


def _tensors(optimizer: Mapping[str, Any], weights: Iterable[Tensor]) -> Iterator[Tensor]:
    for group in optimizer.get("fp32_groups", ()):
        yield from group
    for flat in optimizer.get("fp32_groups_flat", ()):
        yield from _cut(flat, weights)


def _cut(flat: Tensor, weights: Iterable[Tensor]) -> Iterator[Tensor]:
    """A flat group where each weight that it holds begins, if they come in the model's order."""
    start = 0
    for weight in weights:
        piece = flat[start : start + weight.numel()]
        if weight.numel() and torch.equal(piece.to(weight.dtype), weight.flatten()):
            yield piece.view(weight.shape)
            start += weight.numel()


def _digest(values: Tensor) -> bytes:
    raw = values.detach().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(f"{values.dtype}{tuple(values.shape)}".encode() + raw.numpy().tobytes()).digest()
