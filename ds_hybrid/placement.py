"""Which rank, and which slot on it, holds which expert. Pure NumPy: equal on every rank, and hashable."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ds_hybrid.errors import PlacementError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """A bijection between E logical experts and P expert-parallel ranks x E/P slots.

    Attributes:
        rank_of_expert: [E] int64, read-only. The rank inside the expert-parallel group.
        slot_of_expert: [E] int64, read-only. The slot on that rank, 0 <= slot < E/P.

    Raises:
        PlacementError: two experts share a slot, or a slot of some rank is empty.
    """

    rank_of_expert: IntArray
    slot_of_expert: IntArray

    def __post_init__(self) -> None:
        for name in ("rank_of_expert", "slot_of_expert"):
            values = np.array(getattr(self, name), dtype=np.int64)
            values.setflags(write=False)
            object.__setattr__(self, name, values)
        _check_bijection(self.rank_of_expert, self.slot_of_expert)

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Rank r holds experts r * E/P to (r + 1) * E/P - 1 in order: DeepSpeed's own layout."""
        if num_ranks < 1 or num_experts < num_ranks or num_experts % num_ranks:
            raise PlacementError(
                f"{num_experts} experts cannot be spread evenly over {num_ranks} ranks. "
                f"The number of ranks must divide the number of experts."
            )
        return cls.from_slots(np.arange(num_experts).reshape(num_ranks, -1))

    @classmethod
    def from_slots(cls, expert_of_slot: npt.ArrayLike) -> ExpertPlacement:
        """The placement whose slot s of rank r holds expert ``expert_of_slot[r, s]``; shape [P, E/P]."""
        experts = np.asarray(expert_of_slot, dtype=np.int64)
        if experts.ndim != 2:
            raise PlacementError(f"expert_of_slot has shape {list(experts.shape)}, must be [ranks, slots per rank].")
        if sorted(experts.ravel().tolist()) != list(range(experts.size)):
            raise PlacementError(
                f"expert_of_slot = {experts.tolist()} must name each expert 0 to {experts.size - 1} exactly once."
            )
        ranks, slots = np.divmod(np.argsort(experts.ravel(), kind="stable"), experts.shape[1])
        return cls(ranks, slots)

    @property
    def num_experts(self) -> int:
        return len(self.rank_of_expert)

    @cached_property
    def num_ranks(self) -> int:
        return int(self.rank_of_expert.max()) + 1

    @property
    def num_slots(self) -> int:
        """Slots per rank, E/P."""
        return self.num_experts // self.num_ranks

    @cached_property
    def expert_of_slot(self) -> IntArray:
        """[P, E/P] int64: the inverse map."""
        experts = np.empty((self.num_ranks, self.num_slots), dtype=np.int64)
        experts[self.rank_of_expert, self.slot_of_expert] = np.arange(self.num_experts)
        experts.setflags(write=False)
        return experts

    @cached_property
    def digest(self) -> int:
        """A 63-bit number that differs between placements: equal on every rank and in every process."""
        return int.from_bytes(hashlib.sha256(self.expert_of_slot.tobytes()).digest()[:8], "little") >> 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertPlacement) and np.array_equal(self.expert_of_slot, other.expert_of_slot)

    def __hash__(self) -> int:
        return hash((self.num_ranks, self.digest))


def _check_bijection(ranks: IntArray, slots: IntArray) -> None:
    if ranks.ndim != 1 or ranks.shape != slots.shape or not ranks.size:
        raise PlacementError(
            f"rank_of_expert and slot_of_expert have shapes {list(ranks.shape)} and {list(slots.shape)}, "
            "must both be [number of experts]."
        )
    num_ranks = int(ranks.max()) + 1
    num_slots, rest = divmod(len(ranks), num_ranks)
    if rest:
        raise PlacementError(f"{len(ranks)} experts on {num_ranks} ranks: every rank must hold the same number.")
    for expert, (rank, slot) in enumerate(zip(ranks.tolist(), slots.tolist(), strict=True)):
        if rank < 0 or not 0 <= slot < num_slots:
            raise PlacementError(
                f"expert {expert} is at rank {rank}, slot {slot}; must be a rank of 0 to {num_ranks - 1} "
                f"and a slot of 0 to {num_slots - 1}."
            )
    holders = np.bincount(ranks * num_slots + slots, minlength=len(ranks))
    if (holders != 1).any():
        rank, slot = divmod(int(np.argmax(holders != 1)), num_slots)
        experts = np.flatnonzero((ranks == rank) & (slots == slot)).tolist()
        raise PlacementError(f"slot {slot} of rank {rank} holds experts {experts}, must hold exactly one.")
