"""Stage one of the gathering dispatchers: every rank of a group learns which experts every row of the group needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.traffic import id_bytes


def gather_ids(group: RankGroup, ids: Tensor, num_rows: Sequence[int], num_experts: int) -> Tensor:
    """Exchange K expert ids per row, 1, 2 or 4 bytes each.

    Args:
        ids: [N, K] int64, of this rank's rows.
        num_rows: N of each of the P ranks.

    Returns:
        [P, N_max, K] int64: the ids of all ranks' rows, -1 in padding.
    """
    padded = ids.new_zeros((max(num_rows), ids.shape[1]), dtype=_id_dtype(num_experts))
    padded[: len(ids)] = ids
    # Bytes travel: gloo has no 16-bit integers.
    gathered = group.all_gather_metadata(padded.view(torch.uint8)).view(padded.dtype).long()
    if min(num_rows) == max(num_rows):
        return gathered
    position = torch.arange(max(num_rows), device=ids.device)
    is_padding = position >= torch.tensor(num_rows, device=ids.device)[:, None]
    return gathered.masked_fill(is_padding[..., None], -1)


def _id_dtype(num_experts: int) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[id_bytes(num_experts)]
