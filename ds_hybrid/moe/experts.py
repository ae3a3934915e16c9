"""Local experts over rows that are sorted by expert."""

from __future__ import annotations

from deepspeed.module_inject.auto_ep_layer import permute_by_local_expert, unpermute_by_local_expert
from deepspeed.moe.ep_experts import GroupedExperts
from torch import Tensor


def run_experts(experts: GroupedExperts, rows: Tensor, num_rows_per_slot: Tensor) -> Tensor:
    """Run each row through the expert of its slot, as grouped matrix products.

    Args:
        experts: S gated experts of DeepSpeed's AutoEP: w1 and w3 [S, F, H], w2 [S, H, F].
        rows: [R, H], sorted by slot.
        num_rows_per_slot: [S] int64, sums to R; any may be 0.

    Returns:
        [R, H] in the dtype of ``rows``.
    """
    if rows.device.type == "cpu":
        return experts(rows, num_rows_per_slot)
    # On CUDA the backward of the grouped product reads along the rows and needs groups of whole 16 bytes.
    padded, positions, padded_counts, num_rows = permute_by_local_expert(rows, num_rows_per_slot.int())
    return unpermute_by_local_expert(experts(padded, padded_counts), positions, num_rows)
