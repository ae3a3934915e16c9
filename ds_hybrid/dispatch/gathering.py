"""Stage one of the gathering dispatchers: every rank learns where every token of the group goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.dispatch.traffic import id_bytes
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class GatheredRouting:
    """The routing of all P ranks, padded to T_max, the most tokens of any rank.

    Attributes:
        rank_of_choice: [P, T_max, K] int64, the rank of each choice, -1 in padding.
        slot_of_choice: [P, T_max, K] int64, the slot on that rank.
    """

    rank_of_choice: Tensor
    slot_of_choice: Tensor

    @property
    def num_padded_tokens(self) -> int:
        """T_max."""
        return self.rank_of_choice.shape[1]

    def local_slots(self, rank: int) -> Tensor:
        """[P * T_max, K]: the slot of each choice that lies on ``rank``, else -1."""
        return torch.where(self.rank_of_choice == rank, self.slot_of_choice, -1).flatten(0, 1)


class GatheringDispatcher(Dispatcher):
    """A dispatcher whose ranks all see the whole routing before they move rows."""

    def gather_routing(self, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> GatheredRouting:
        """Exchange token counts and the guard's facts, then K ids per token of 1, 2 or 4 bytes each.

        Raises:
            DispatchError: on every rank, when the ranks disagree.
        """
        header = torch.tensor([routing.num_tokens, *self.facts(tokens, routing, placement)], device=tokens.device)
        headers = self.group.all_gather_metadata(header).tolist()
        self.check([facts for _, *facts in headers])
        num_tokens = [num for num, *_ in headers]

        padded = routing.topk_ids.new_zeros((max(num_tokens), routing.top_k), dtype=_id_dtype(routing.num_experts))
        padded[: routing.num_tokens] = routing.topk_ids
        # Bytes travel: gloo has no 16-bit integers.
        ids = self.group.all_gather_metadata(padded.view(torch.uint8)).view(padded.dtype)
        rank, slot = self.locate(ids.long(), placement)
        if min(num_tokens) < len(padded):
            position = torch.arange(len(padded), device=tokens.device)
            is_padding = position >= torch.tensor(num_tokens, device=tokens.device)[:, None]
            rank = rank.masked_fill(is_padding[..., None], -1)
        return GatheredRouting(rank, slot)


def _id_dtype(num_experts: int) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[id_bytes(num_experts)]
