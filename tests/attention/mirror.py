"""One rank of a group in one process, on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.attention.blocks import FusedKernel, Gradients, Mask, Part, Whole
from ds_hybrid.attention.choose import Clock
from ds_hybrid.dispatch.collectives import RankGroup, Transfer
from ds_hybrid.dispatch.meter import Meter


class Mirror(RankGroup):
    """Ranks that all hold the same: what the others send, this one sends. A message takes the clock's time."""

    def __init__(self, size: int, rank: int, clock: Clock) -> None:
        self.size, self.rank, self.meter, self._clock = size, rank, Meter(), clock

    def all_gather(self, rows: Tensor) -> Transfer:
        return self._transfer(rows.nbytes * (self.size - 1), torch.cat([rows] * self.size))

    def reduce_scatter(self, rows: Tensor) -> Transfer:
        return self._transfer(rows.nbytes // self.size * (self.size - 1), rows.chunk(self.size)[self.rank - 1])

    def shift(self, rows: Tensor) -> Transfer:
        return self._transfer(rows.nbytes, rows.clone())

    def _transfer(self, num_bytes: int, result: Tensor) -> Transfer:
        return Transfer(_Arrival(self._clock, self._clock.send(num_bytes)), lambda: result)


@dataclass(frozen=True)
class _Arrival:
    clock: Clock
    at: float

    def wait(self) -> None:
        self.clock.wait(self.at)


class TimedKernel(FusedKernel):
    """Each matrix product takes its multiplications and additions."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        self._charge(part.query, part.key, part.mask, part.key.shape[3] + part.value.shape[3])
        return super().forward(part)

    def backward(self, part: Part, whole: Whole) -> Gradients:
        self._charge(part.query, part.key, part.mask, 3 * part.key.shape[3] + 2 * part.value.shape[3])
        return super().backward(part, whole)

    def scores(self, query: Tensor, key: Tensor, mask: Mask, scale: float) -> Tensor:
        self._charge(query, key, mask, key.shape[3])
        return super().scores(query, key, mask, scale)

    def weigh(self, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._clock.compute(2 * scores.numel() * value.shape[3])
        return super().weigh(scores, value)

    def _charge(self, query: Tensor, key: Tensor, mask: object, num_dims: int) -> None:
        rows, columns = query.shape[2], key.shape[2]
        pairs = rows * (rows + 1) / 2 if isinstance(mask, str) and mask == "causal" else rows * columns
        self._clock.compute(2 * query.shape[0] * query.shape[1] * pairs * num_dims)
