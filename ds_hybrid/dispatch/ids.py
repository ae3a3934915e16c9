"""Stage one of the gathering dispatchers: every rank learns where every token of the group goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class GatheredRouting:
    """The routing of all P ranks, padded to the longest of them.

    Attributes:
        rank_of_choice: [P, T_max, K] int64, the rank of each choice, -1 in padding.
        slot_of_choice: [P, T_max, K] int64, the slot on that rank.
    """

    rank_of_choice: Tensor
    slot_of_choice: Tensor

    def local_slots(self, rank: int) -> Tensor:
        """[P * T_max, K]: the slot of each choice that lies on ``rank``, else -1."""
        return torch.where(self.rank_of_choice == rank, self.slot_of_choice, -1).flatten(0, 1)


def gather_routing(
    dispatcher: Dispatcher, tokens: Tensor, routing: Routing, placement: ExpertPlacement
) -> GatheredRouting:
    """Exchange token counts and the guard's facts, then K ids per token of :func:`id_dtype` bytes."""
    group = dispatcher.group
    header = torch.tensor([routing.num_tokens, *dispatcher.facts(tokens, routing, placement)], device=tokens.device)
    headers = group.all_gather_metadata(header).tolist()
    dispatcher.check([facts for _, *facts in headers])

    num_tokens = [num for num, *_ in headers]
    longest = max(num_tokens)
    padded = routing.topk_ids.new_zeros((longest, routing.top_k), dtype=id_dtype(routing.num_experts))
    padded[: routing.num_tokens] = routing.topk_ids
    # gloo has no 16-bit integers: bytes travel.
    wire = group.all_gather_metadata(padded.view(torch.uint8))
    rank, slot = dispatcher.locate(wire.view(padded.dtype).long(), placement)
    if min(num_tokens) < longest:
        position = torch.arange(longest, device=tokens.device)
        is_padding = position >= torch.tensor(num_tokens, device=tokens.device)[:, None]
        rank = rank.masked_fill(is_padding[..., None], -1)
    return GatheredRouting(rank, slot)


def id_dtype(num_experts: int) -> torch.dtype:
    """The narrowest integer that holds every expert id: 1, 2 or 4 bytes."""
    return torch.uint8 if num_experts <= 2**8 else torch.int16 if num_experts <= 2**15 else torch.int32
