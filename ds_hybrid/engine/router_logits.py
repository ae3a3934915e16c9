"""Hugging Face's router logits over converted layers.

A transformers model with ``output_router_logits`` collects what its routers return, through hooks that it installs by
the class of its own routers. AutoEP replaces those routers and rewrites transformers' private hook registry, which
transformers 5.24 keys differently: the conversion crashes. Here the conversion is kept from seeing the recorders, and
each converted layer gets one hook of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ds_hybrid.moe.autoep import HybridAutoEPLayer

_KEY = "router_logits"


@contextmanager
def router_recorders_hidden(model: nn.Module) -> Iterator[None]:
    """While open, no part of ``model`` declares that it can record router logits (AutoEP then leaves hooks alone)."""
    recording = [module for module in model.modules() if _KEY in _recordable(module)]
    for module in recording:
        visible = {key: value for key, value in _recordable(module).items() if key != _KEY}
        module._can_record_outputs = visible  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in recording:
            del module._can_record_outputs


def record_router_logits(model: nn.Module) -> None:
    """Let every converted layer hand its router logits to transformers' collector, where the model records any."""
    if not any(_KEY in _recordable(module) for module in model.modules()):
        return
    for layer in model.modules():
        if not isinstance(layer, HybridAutoEPLayer):
            continue
        if layer.return_router_logits:
            layer.register_forward_hook(lambda _module, _args, output: _collect(output[1]))
        elif layer.router_logits_capture_target == "router":
            layer.router.gate.register_forward_hook(lambda _module, _args, output: _collect(output))


def _collect(logits: Any) -> None:
    from transformers.utils import output_capturing

    collected = output_capturing._active_collector.get()
    if collected is not None and _KEY in collected and logits is not None:
        collected[_KEY].append(logits)


def _recordable(module: nn.Module) -> dict[str, Any]:
    return getattr(module, "_can_record_outputs", None) or {}
