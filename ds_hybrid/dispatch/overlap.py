"""Experts compute one part of the tokens while other parts travel."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ds_hybrid.dispatch.arrived import Experts
from ds_hybrid.dispatch.dispatcher import Dispatcher, Plan
from ds_hybrid.dispatch.missing import explained
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.dispatch.spans import is_in_backward
from ds_hybrid.dispatch.steps import Steps, run_staggered
from ds_hybrid.placement import ExpertPlacement


def run_in_chunks(
    dispatcher: Dispatcher[Plan],
    tokens: Tensor,
    routing: Routing,
    placement: ExpertPlacement,
    experts: Experts,
    *,
    num_chunks: int,
) -> Tensor:
    """Dispatch, experts and combine, with other chunks' rows in flight while the experts work on one.

    All plans come first: what they exchange never waits behind rows, and the host waits for the device only there.
    Backward runs it all in reverse, so its gradients fly under compute too. What cannot hide is the first chunk's
    dispatch and the last one's combine. Every rank cuts its tokens into equally many chunks, empty ones if need be.

    Args:
        tokens: [T, H].

    Returns:
        [T, H].

    Raises:
        DispatchError: the ranks disagree; or some did not come before the backend gave up.
    """
    size, rest = divmod(routing.num_tokens, num_chunks)
    sizes = [size + 1] * rest + [size] * (num_chunks - rest)
    parts = tokens.split(sizes)
    choices = zip(routing.topk_ids.split(sizes), routing.topk_weights.split(sizes), strict=True)
    routings = [Routing(ids, weights, routing.num_experts) for ids, weights in choices]
    try:
        with dispatcher.group.meter.spans.work("plan"):
            plans = [dispatcher.plan(part, routed, placement) for part, routed in zip(parts, routings, strict=True)]
    except RuntimeError as error:
        raise explained(error, dispatcher.group, layer=dispatcher.layer) from error
    works = [_one_chunk(dispatcher, part, plan, experts) for part, plan in zip(parts, plans, strict=True)]
    outputs = run_staggered(works)
    return outputs[0] if num_chunks == 1 else torch.cat(outputs)


def _one_chunk(dispatcher: Dispatcher[Plan], tokens: Tensor, plan: Plan, experts: Experts) -> Steps[Tensor]:
    spans = dispatcher.group.meter.spans
    trail = spans.trail()
    tokens = trail.mark(tokens, ends="dispatch")
    arrived = yield from spans.steps("dispatch", dispatcher.dispatch(tokens, plan))
    if not is_in_backward():
        dispatcher.group.meter.add_arrived(len(arrived.tokens))
    arrived = replace(arrived, tokens=trail.mark(arrived.tokens, ends="experts", begins="dispatch"))
    with spans.work("experts"):
        sums = experts(arrived)
    sums = trail.mark(sums, ends="combine", begins="experts")
    output = yield from spans.steps("combine", dispatcher.combine(sums, plan))
    return trail.mark(output, begins="combine")
