"""The contract of every dispatcher, and what they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hybrid.dispatch.arrived import Arrived
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.demand import DemandTotal, demand_of
from ds_hybrid.dispatch.guard import CallFacts, check_agreement, facts_of_call
from ds_hybrid.dispatch.meter import crossing
from ds_hybrid.dispatch.modes import Mode, WireDtype
from ds_hybrid.dispatch.routing import Routing, ranks_needed
from ds_hybrid.dispatch.rows import RowMap, group_by_slot
from ds_hybrid.dispatch.spans import is_in_backward
from ds_hybrid.dispatch.steps import Steps
from ds_hybrid.errors import DispatchError
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class Plan:
    """What one call will move, known before any row leaves. Each dispatcher adds what it needs.

    Attributes:
        routing: of this rank's T tokens.
        num_rows_needed: [] int64 on the device, the tokens that must reach each other rank, each once, added up.
        pairs: R rows, sorted by local slot, for cells of the [N, M] choices of the tokens that will arrive.
        num_rows_per_slot: [E/P] int64, sums to R.
    """

    routing: Routing
    num_rows_needed: Tensor
    pairs: RowMap
    num_rows_per_slot: Tensor

    def arrived(self, tokens: Tensor, weights: Tensor | None) -> Arrived:
        """The tokens [N, H] that have come, with their weights [N, M]."""
        return Arrived(tokens, self.pairs, self.num_rows_per_slot, weights)


PlanT = TypeVar("PlanT", bound=Plan)


class Dispatcher(ABC, Generic[PlanT]):
    """Brings tokens to the ranks that hold their experts, and the experts' results back.

    A call is three works in turn: :meth:`plan` exchanges integers, :meth:`dispatch` and :meth:`combine` move rows. What
    a call learns travels in its plan, so one dispatcher serves shared layers, micro-batches and recomputation. All
    ranks of the group call it together; T may differ between them and may be 0.

    Args:
        group: the expert-parallel group and its meter.
        layer: the layer's name, for messages.
        guard: compare shapes, dtype and placement over the ranks before payload moves.
        wire_dtype: how values travel to the experts; ``"auto"`` as they are.
        node_of_rank: the node, 0 to N-1, of each rank of the group, where they are known.
        watch: adds up what the calls ask for.
    """

    mode: ClassVar[Mode]

    def __init__(
        self,
        group: RankGroup,
        *,
        layer: str = "MoE layer",
        guard: bool = True,
        wire_dtype: WireDtype = "auto",
        node_of_rank: Sequence[int] = (),
        watch: DemandTotal | None = None,
    ) -> None:
        self.group = group
        self.layer = layer
        self.guard = guard
        self.wire_dtype = wire_dtype
        self.node_of_rank = tuple(node_of_rank)
        self.watch = watch
        self._tables: dict[tuple[ExpertPlacement, torch.device], tuple[Tensor, Tensor]] = {}
        self._constants: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    @abstractmethod
    def plan(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> PlanT:
        """Agree with the other ranks on what will move. The host waits for the device here, and nowhere later.

        Args:
            tokens: [T, H]; only their shape and dtype matter.

        Raises:
            DispatchError: on every rank, when the ranks disagree.
        """

    @abstractmethod
    def dispatch(self, tokens: Tensor, plan: PlanT) -> Steps[Arrived]:
        """Bring tokens [T, H] to their experts; pauses while they are under way."""

    @abstractmethod
    def combine(self, partial_sums: Tensor, plan: PlanT) -> Steps[Tensor]:
        """Bring what this rank's experts made of the N arrived tokens [N, H] back to [T, H]: for each token the sum
        over k of weight x expert. Pauses while it is under way.
        """

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

    def constant(self, values: tuple[int, ...], device: torch.device) -> Tensor:
        """Integers of the dispatcher as a tensor, which stays on the device."""
        key = (values, device)
        if key not in self._constants:
            self._constants[key] = torch.tensor(values, device=device)
        return self._constants[key]

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

    def facts(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> CallFacts:
        """What to send for :meth:`check`; nothing when the guard is off.

        Raises:
            DispatchError: the guard is off, and tokens, routing and placement do not fit each other on this rank.
        """
        facts = facts_of_call(self.mode, tokens, routing, placement)
        if self.guard:
            return facts
        if facts.fault is not None:
            raise DispatchError(f"{self.layer}: {facts.fault}")
        return CallFacts(())

    def gather_counts(self, group: RankGroup, num_rows: int, facts: CallFacts | None = None) -> list[int]:
        """The number of rows of each rank of ``group``; what all ranks must agree on rides along.

        Raises:
            DispatchError: on every rank, when the facts differ.
        """
        values = () if facts is None else facts.values
        header = torch.tensor([num_rows, *values], device=get_accelerator().current_device_name())
        headers = group.all_gather_metadata(header).tolist()
        if facts is not None:
            self.check([theirs for _, *theirs in headers], facts)
        return [num for num, *_ in headers]

    def check(self, facts_of_rank: list[list[int]], own: CallFacts) -> None:
        """Raise on every rank if the ranks' :meth:`facts` differ."""
        if self.guard:
            check_agreement(facts_of_rank, own, layer=self.layer)

    def count(self, rank_of_choice: Tensor) -> Tensor:
        """Note what the choices of this rank's tokens [T, K] ask for -> [] int64, the rows that have to cross.

        A forward that activation checkpointing repeats has been noted already.
        """
        if not is_in_backward():
            self.group.meter.add_tokens(len(rank_of_choice))
            if self.watch is not None:
                nodes = self.constant(self.node_of_rank, rank_of_choice.device) if self.node_of_rank else None
                demand = demand_of(rank_of_choice, num_ranks=self.group.size, node_of_rank=nodes)
                self.watch.add(demand, num_tokens=len(rank_of_choice))
        needed = ranks_needed(rank_of_choice, self.group.size)
        return needed.sum() - needed[:, self.group.rank].sum()

    def crossing(self, rows: Tensor, plan: Plan) -> Tensor:
        """Note on the meter that ``rows`` cross to the experts or back."""
        return crossing(rows, plan.num_rows_needed, self.group.meter)
