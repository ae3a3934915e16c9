"""Experts compute one part of the tokens while another part travels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.placement import ExpertPlacement


def run_in_chunks(
    dispatcher: Dispatcher,
    tokens: Tensor,
    routing: Routing,
    placement: ExpertPlacement,
    run_experts: Callable[[Tensor, Tensor], Tensor],
    *,
    num_chunks: int,
) -> Tensor:
    """Dispatch, experts and combine, with the next chunk's rows in flight while the experts work on this one's.

    Backward runs it all in reverse, so its gradients fly under compute too. What cannot hide is the first chunk's
    dispatch and the last one's combine. Every rank cuts its tokens into equally many chunks, empty ones if need be.

    Args:
        tokens: [T, H].
        run_experts: rows [R, H] sorted by slot, and how many each slot has -> [R, H].

    Returns:
        [T, H].
    """
    size, rest = divmod(routing.num_tokens, num_chunks)
    sizes = [size + 1] * rest + [size] * (num_chunks - rest)
    parts = zip(tokens.split(sizes), routing.topk_ids.split(sizes), routing.topk_weights.split(sizes), strict=True)
    chunks = [(part, Routing(ids, weights, routing.num_experts)) for part, ids, weights in parts]
    combining = []
    started = dispatcher.start_dispatch(*chunks[0], placement)
    for number in range(num_chunks):
        following = dispatcher.start_dispatch(*chunks[number + 1], placement) if number + 1 < num_chunks else None
        rows, num_rows_per_slot, state = dispatcher.finish_dispatch(started)
        flight = dispatcher.start_combine(run_experts(rows, num_rows_per_slot), state)
        combining.append((flight, state))
        started = following
    outputs = [dispatcher.finish_combine(flight, state) for flight, state in combining]
    return outputs[0] if num_chunks == 1 else torch.cat(outputs)
