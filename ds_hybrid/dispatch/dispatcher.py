"""The contract of every dispatcher, and what they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.exchanges import Flight
from ds_hybrid.dispatch.guard import check_agreement, facts_of_call
from ds_hybrid.dispatch.meter import crossing
from ds_hybrid.dispatch.modes import Mode, WireDtype
from ds_hybrid.dispatch.routing import Routing, ranks_needed
from ds_hybrid.dispatch.rows import RowMap, group_by_slot
from ds_hybrid.placement import ExpertPlacement


class Dispatcher(ABC):
    """Brings tokens to the ranks that hold their experts, and the experts' results back.

    What a call learns travels in the returned state, so one dispatcher serves shared layers, micro-batches and
    recomputation. All ranks of the group call it together; T may differ between them and may be 0.

    Args:
        group: the expert-parallel group and its meter.
        layer: the layer's name, for messages.
        guard: compare shapes, dtype and placement over the ranks before payload moves.
        wire_dtype: how values travel to the experts; ``"auto"`` as they are.
    """

    mode: ClassVar[Mode]

    def __init__(
        self,
        group: RankGroup,
        *,
        layer: str = "MoE layer",
        guard: bool = True,
        wire_dtype: WireDtype = "auto",
    ) -> None:
        self.group = group
        self.layer = layer
        self.guard = guard
        self.wire_dtype = wire_dtype
        self._tables: dict[tuple[ExpertPlacement, torch.device], tuple[Tensor, Tensor]] = {}

    def dispatch(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> tuple[Tensor, Tensor, Any]:
        """tokens [T, H] -> rows [R, H] sorted by local slot, num_rows_per_slot [E/P] int64, and a frozen state.

        Raises:
            DispatchError: on every rank, when the ranks disagree.
        """
        return self.finish_dispatch(self.start_dispatch(tokens, routing, placement))

    def combine(self, expert_rows: Tensor, state: Any) -> Tensor:
        """expert_rows [R, H] in the order of dispatch -> [T, H]: for each token the sum over k of weight x expert."""
        return self.finish_combine(self.start_combine(expert_rows, state), state)

    @abstractmethod
    def start_dispatch(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> Any:
        """The first half of :meth:`dispatch`: what it returns has rows under way."""

    @abstractmethod
    def finish_dispatch(self, started: Any) -> tuple[Tensor, Tensor, Any]:
        """The second half of :meth:`dispatch`."""

    @abstractmethod
    def start_combine(self, expert_rows: Tensor, state: Any) -> Flight:
        """The first half of :meth:`combine`."""

    @abstractmethod
    def finish_combine(self, flight: Flight, state: Any) -> Tensor:
        """The second half of :meth:`combine`."""

    def locate(self, expert_ids: Tensor, placement: ExpertPlacement) -> tuple[Tensor, Tensor]:
        """Where experts live: ids [...] -> ranks [...] and slots [...], -1 for id -1. The tables stay on the device."""
        key = (placement, expert_ids.device)
        if key not in self._tables:
            self._tables = {
                key: (
                    torch.tensor([*placement.rank_of_expert.tolist(), -1], device=expert_ids.device),
                    torch.tensor([*placement.slot_of_expert.tolist(), -1], device=expert_ids.device),
                )
            }
        rank_of_expert, slot_of_expert = self._tables[key]
        return rank_of_expert[expert_ids], slot_of_expert[expert_ids]

    def pairs_here(
        self, ids: Tensor, placement: ExpertPlacement, num_pairs: int | None = None
    ) -> tuple[RowMap, Tensor]:
        """The choices [N, K] that are experts of this rank as rows sorted by slot, and the rows of each slot [E/P].

        Args:
            num_pairs: how many those are; where it is not known, the host waits for the device.
        """
        rank, slot = self.locate(ids, placement)
        local_slot = torch.where(rank == self.group.rank, slot, -1)
        if num_pairs is None:
            num_pairs = int((local_slot >= 0).sum())
        return group_by_slot(local_slot, placement.num_slots, num_pairs)

    def facts(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> list[int]:
        """The integers to send for :meth:`check`; none when the guard is off."""
        facts = facts_of_call(tokens, routing, placement)
        return facts if self.guard else []

    def gather_counts(self, group: RankGroup, num_rows: int, facts: Sequence[int] = ()) -> list[int]:
        """The number of rows of each rank of ``group``; what all ranks must agree on rides along.

        Raises:
            DispatchError: on every rank, when the facts differ.
        """
        header = torch.tensor([num_rows, *facts], device=get_accelerator().current_device_name())
        headers = group.all_gather_metadata(header).tolist()
        if facts:
            self.check([theirs for _, *theirs in headers])
        return [num for num, *_ in headers]

    def check(self, facts_of_rank: list[list[int]]) -> None:
        """Raise on every rank if the ranks' :meth:`facts` differ."""
        if self.guard:
            check_agreement(facts_of_rank, layer=self.layer)

    def num_rows_needed(self, rank_of_choice: Tensor) -> Tensor:
        """How many rows must leave this rank when its tokens' choices lie on these ranks [T, K]: [] int64."""
        needed = ranks_needed(rank_of_choice, self.group.size)
        return needed.sum() - needed[:, self.group.rank].sum()

    def crossing(self, rows: Tensor, num_rows_needed: Tensor) -> Tensor:
        """Note on the meter that ``rows`` cross to the experts or back."""
        return crossing(rows, num_rows_needed, self.group.meter)
