"""Router, dispatcher and local experts in a row: what a MoE layer computes, free of DeepSpeed's interface."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ds_hybrid.dispatch.arrived import by_rows
from ds_hybrid.dispatch.overlap import run_in_chunks
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.dispatch.rows import RowMap, expand, weighted_sum
from ds_hybrid.dispatch.switch import DispatchSwitch
from ds_hybrid.errors import ConfigError
from ds_hybrid.moe.local_experts import LocalExperts
from ds_hybrid.moe.router import Router, RouterOutput
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class MoEResult:
    """What a MoE layer computed for this rank's tokens.

    Attributes:
        output: in the shape and dtype of the input; 0 for masked tokens and for those that every expert dropped.
        l_aux: [] float32, ``loss`` of :class:`ds_hybrid.moe.router.RouterOutput`; the caller adds it to the loss.
        num_routed: [E] int64, the (token, choice) pairs that chose each logical expert.
        num_processed: [E] int64, those of them that the expert worked on; fewer only where capacity drops.
    """

    output: Tensor
    l_aux: Tensor
    num_routed: Tensor
    num_processed: Tensor


class RoutedExperts(nn.Module):
    """Tokens to their experts and back.

    Attributes:
        gate, experts: under DeepSpeed's names.
        placement: which rank and slot holds which expert.
    """

    def __init__(self, gate: Router, experts: LocalExperts, placement: ExpertPlacement) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.placement = placement
        self._switch: DispatchSwitch | None = None
        self._num_chunks = 1

    def bind(self, switch: DispatchSwitch, *, num_chunks: int = 1) -> None:
        """Move tokens with the dispatcher of ``switch`` from now on, in ``num_chunks`` parts."""
        self._switch = switch
        self._num_chunks = num_chunks

    @property
    def switch(self) -> DispatchSwitch:
        """What moves the tokens.

        Raises:
            ConfigError: the layer has no expert-parallel group yet.
        """
        if self._switch is None:
            raise ConfigError(
                f"ds_hybrid.MoE(ep_size={self.placement.num_ranks}) has no expert-parallel group yet. "
                "Pass the model to ds_hybrid.initialize or deepspeed.initialize before its first forward."
            )
        return self._switch

    def forward(self, tokens: Tensor, is_used: Tensor | None = None) -> MoEResult:
        """tokens [T, H]; is_used [T] bool, or None for all. Collective over the expert-parallel group.

        Raises:
            DispatchError: on every rank, when the ranks disagree.
        """
        dispatcher = self.switch.dispatcher
        meter = dispatcher.group.meter
        meter.begin(training=self.training)
        with meter.spans.work("router"):
            routed: RouterOutput = self.gate(tokens, is_used)
        cargo = pack_kept(tokens, routed, by_pair=self.gate.options.capacity is not None)
        experts = meter.timed(by_rows(self.experts), training=self.training)
        combined = run_in_chunks(
            dispatcher, cargo.tokens, cargo.routing, self.placement, experts, num_chunks=self._num_chunks
        )
        output = cargo.unpack(combined)
        return MoEResult(output, routed.loss, routed.num_routed, routed.num_processed)


@dataclass(frozen=True)
class Cargo:
    """What is handed to the dispatcher, and how its answer becomes tokens again.

    Attributes:
        tokens, routing: N tokens, or N copies of tokens with one expert each.
        cells: which cell of [T, 1], or of [T, K], each of the N stands for; None when the N are the T tokens.
        weights: [T, K] where the dispatcher must not weigh, because every copy has one expert; else None.
    """

    tokens: Tensor
    routing: Routing
    cells: RowMap | None = None
    weights: Tensor | None = None

    def unpack(self, combined: Tensor) -> Tensor:
        """[N, H] -> [T, H]; a token that was left behind is 0."""
        return combined if self.cells is None else weighted_sum(combined, self.cells, self.weights)


def pack_kept(tokens: Tensor, routed: RouterOutput, *, by_pair: bool) -> Cargo:
    """Leave behind what is not kept, so that no rank sends it and no expert computes it.

    Args:
        by_pair: a token may keep some of its K experts and lose others, so each kept pair travels as a token of one
            expert; otherwise a token keeps all or none. Every rank of the group says the same.
    """
    routing, kept = routed.routing, routed.kept
    if kept is None:
        return Cargo(tokens, routing)
    num_copies = routing.top_k if by_pair else 1
    cells = RowMap.of(kept[:, :num_copies].reshape(-1).nonzero()[:, 0], routing.num_tokens, num_copies)
    if not by_pair:
        ids, weights = routing.topk_ids[cells.cell_of_row], expand(routing.topk_weights, cells)
        return Cargo(expand(tokens, cells), Routing(ids, weights, routing.num_experts), cells)
    ids = routing.topk_ids.reshape(-1, 1)[cells.cell_of_row]
    ones = torch.ones_like(ids, dtype=routing.topk_weights.dtype)
    return Cargo(expand(tokens, cells), Routing(ids, ones, routing.num_experts), cells, routing.topk_weights)
