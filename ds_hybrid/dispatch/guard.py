"""All ranks of a group call the same dispatch, or every one of them raises the same readable error.

The facts that must agree ride as a few integers on the first message that a dispatcher sends anyway, before any payload
moves; a rank that differs would otherwise leave its peers waiting for rows that never come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from ds_hybrid.dispatch.modes import Mode
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.errors import DispatchError
from ds_hybrid.placement import ExpertPlacement

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MODES: tuple[Mode, ...] = get_args(Mode)
_FACTS = ("mode", "hidden size", "dtype", "top-k", "number of experts", "placement digest")


def facts_of_call(mode: Mode, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> list[int]:
    """What must be equal on every rank of the group, as integers.

    Raises:
        DispatchError: tokens, routing and placement do not fit each other on this rank.
    """
    if tokens.ndim != 2 or tokens.dtype not in _DTYPES:
        raise DispatchError(f"tokens are {tokens.dtype} {list(tokens.shape)}, must be floating point [tokens, hidden].")
    if len(tokens) != routing.num_tokens:
        raise DispatchError(f"{len(tokens)} tokens but {routing.num_tokens} rows of routing: must be equal.")
    if placement.num_experts != routing.num_experts:
        raise DispatchError(
            f"the router chooses among {routing.num_experts} experts, the placement holds {placement.num_experts}."
        )
    return [
        _MODES.index(mode),
        tokens.shape[1],
        _DTYPES.index(tokens.dtype),
        routing.top_k,
        routing.num_experts,
        placement.digest,
    ]


def check_agreement(facts_of_rank: Sequence[Sequence[int]], *, layer: str) -> None:
    """Compare every rank's :func:`facts_of_call`; the ranks of a group see the same lists and so raise alike.

    Raises:
        DispatchError: naming the layer, the two ranks, the fact and both values.
    """
    for rank, facts in enumerate(facts_of_rank):
        for name, value, expected in zip(_FACTS, facts, facts_of_rank[0], strict=True):
            if value != expected:
                raise DispatchError(
                    f"{layer}: expert-parallel ranks 0 and {rank} disagree on the {name}: "
                    f"{_readable(name, expected)} and {_readable(name, value)}. "
                    "Every rank must build the same model from the same ds_config."
                )


def _readable(name: str, value: int) -> str:
    if name == "mode":
        return _MODES[value]
    return str(_DTYPES[value]) if name == "dtype" else str(value)
