"""DeepSpeed's grouped experts over tokens that have arrived."""

from __future__ import annotations

from deepspeed.module_inject.auto_ep_layer import permute_by_local_expert, unpermute_by_local_expert
from deepspeed.moe.ep_experts import GroupedExperts
from torch import Tensor

from ds_hybrid.dispatch.arrived import Arrived
from ds_hybrid.dispatch.rows import RowMap, expand, weighted_sum
from ds_hybrid.moe.weighted_experts import Activation, align_groups, weighted_experts

_CUDA_ALIGNMENT = 16
"""Rows: on CUDA the grouped product that yields weight gradients reads along the rows, in runs of whole 16 bytes."""


class HybridExperts(GroupedExperts):
    """S gated experts, w1 and w3 [S, F, H], w2 [S, H, F]: DeepSpeed's module, taken over by :meth:`adopt`."""

    @classmethod
    def adopt(cls, experts: GroupedExperts) -> HybridExperts:
        """The same module with its parameters and marks; only its forward is ours."""
        experts.__class__ = cls
        assert isinstance(experts, HybridExperts)
        return experts

    def run(self, arrived: Arrived) -> Tensor:
        """The (weighted) sums over this rank's experts, [N, H] in the dtype of the tokens."""
        return self(arrived.tokens, arrived.weights, arrived.pairs, arrived.num_rows_per_slot)

    def forward(self, tokens: Tensor, weights: Tensor | None, pairs: RowMap, num_rows_per_slot: Tensor) -> Tensor:
        """The fields of an :class:`Arrived`, one by one: ZeRO-3 follows tensors among a module's arguments."""
        if not self.use_grouped_mm or self.use_triton_grouped_mm or self.gate_up_impl == "fused":
            rows = self._run_rows(expand(tokens, pairs), num_rows_per_slot)
            return weighted_sum(rows, pairs, weights)
        alignment = _CUDA_ALIGNMENT if tokens.is_cuda else 1
        activation = Activation(self.activation, self.activation_alpha, self.activation_limit)
        return weighted_experts(
            tokens,
            weights,
            (self.w1, self.w2, self.w3),
            align_groups(pairs, num_rows_per_slot, alignment),
            activation,
        )

    def _run_rows(self, rows: Tensor, num_rows_per_slot: Tensor) -> Tensor:
        if not rows.is_cuda:
            return super().forward(rows, num_rows_per_slot)
        padded, positions, padded_counts, num_rows = permute_by_local_expert(rows, num_rows_per_slot.int())
        return unpermute_by_local_expert(super().forward(padded, padded_counts), positions, num_rows)
