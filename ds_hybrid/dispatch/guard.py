"""All ranks of a group call the same dispatch, or every one of them raises the same readable error.

The facts that must agree ride as a few integers on the first message that a dispatcher sends anyway, before any payload
moves; a rank that differs would otherwise leave its peers waiting for rows that never come. Split sizes need no check
of their own: both sides of a message derive them from the same gathered integers. What never changes after the start
(the experts of a layer, its options) is compared there, by :mod:`ds_hybrid.engine.agreement`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybrid.dispatch.modes import ALL_MODES, Mode
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.errors import DispatchError
from ds_hybrid.placement import ExpertPlacement

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NAMES = ("mode", "hidden size", "dtype", "top-k", "number of experts", "placement digest")


@dataclass(frozen=True)
class CallFacts:
    """What one rank calls a dispatcher with.

    Attributes:
        values: ``NUM_FACTS`` integers: 1 where the rank cannot dispatch what it was given, then what must be equal on
            every rank. Empty when the guard is off.
        fault: what is wrong on this rank.
    """

    values: tuple[int, ...]
    fault: str | None = None


def facts_of_call(mode: Mode, tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> CallFacts:
    """The facts of this rank's call."""
    fault = _fault(tokens, routing, placement)
    if fault is not None:
        return CallFacts((1, *[0] * len(_NAMES)), fault)
    dtype = _DTYPES.index(tokens.dtype)
    shared = (ALL_MODES.index(mode), tokens.shape[1], dtype, routing.top_k, routing.num_experts, placement.digest)
    return CallFacts((0, *shared))


def check_agreement(facts_of_rank: Sequence[Sequence[int]], own: CallFacts, *, layer: str) -> None:
    """Compare the ``values`` of every rank; the ranks of a group see the same lists and so raise together.

    Raises:
        DispatchError: naming the layer, the two ranks, the fact and both values; or the rank that has a fault.
    """
    if own.fault is not None:
        raise DispatchError(f"{layer}: {own.fault}")
    for rank, (is_faulty, *_) in enumerate(facts_of_rank):
        if is_faulty:
            raise DispatchError(
                f"{layer}: expert-parallel rank {rank} was given what it cannot dispatch. Its own message tells what."
            )
    for rank, (_, *facts) in enumerate(facts_of_rank):
        for name, value, expected in zip(_NAMES, facts, facts_of_rank[0][1:], strict=True):
            if value != expected:
                raise DispatchError(
                    f"{layer}: expert-parallel ranks 0 and {rank} disagree on the {name}: "
                    f"{_readable(name, expected)} and {_readable(name, value)}. "
                    "Every rank must build the same model from the same ds_config."
                )


def _fault(tokens: Tensor, routing: Routing, placement: ExpertPlacement) -> str | None:
    if tokens.ndim != 2 or tokens.dtype not in _DTYPES:
        return f"tokens are {tokens.dtype} {list(tokens.shape)}, must be floating point [tokens, hidden]."
    if len(tokens) != routing.num_tokens:
        return f"{len(tokens)} tokens but {routing.num_tokens} rows of routing: must be equal."
    if placement.num_experts != routing.num_experts:
        return f"the router chooses among {routing.num_experts} experts, the placement holds {placement.num_experts}."
    return None


def _readable(name: str, value: int) -> str:
    if name == "mode":
        return ALL_MODES[value]
    return str(_DTYPES[value]) if name == "dtype" else str(value)
