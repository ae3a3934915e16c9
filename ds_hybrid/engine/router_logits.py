"""Hugging Face's router logits over converted layers.

A transformers model with ``output_router_logits`` collects what its routers return, through hooks that it installs by
the class of its own routers. AutoEP replaces those routers and rewrites transformers' private hook registry, which
transformers 5.24 keys differently: the conversion crashes. Here the conversion is kept from seeing the recorders, and
each converted layer gets one hook of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn

from ds_hybrid.moe.autoep import HybridAutoEPLayer

_KEY = "router_logits"


@contextmanager
def router_recorders_hidden(model: nn.Module) -> Iterator[None]:
    """While open, no part of ``model`` declares that it can record router logits, so AutoEP leaves its hooks alone.

    AutoEP's warning that it found nothing to record is kept from the log: it is what is asked for here.
    """
    recording = [module for module in model.modules() if _KEY in _recordable(module)]
    of_instance = [vars(module).get("_can_record_outputs") for module in recording]
    for module in recording:
        visible = {key: value for key, value in _recordable(module).items() if key != _KEY}
        module._can_record_outputs = visible  # type: ignore[assignment]
    deepspeed_logger.addFilter(_is_not_about_recorders)
    try:
        yield
    finally:
        deepspeed_logger.removeFilter(_is_not_about_recorders)
        for module, recordable in zip(recording, of_instance, strict=True):
            del module._can_record_outputs
            if recordable is not None:
                module._can_record_outputs = recordable


def record_router_logits(model: nn.Module, layers: Iterable[HybridAutoEPLayer]) -> None:
    """Let newly converted layers hand their router logits to transformers' collector, where the model records any.

    What is recorded is the router's linear output, before softmax or sigmoid, as transformers' own routers give it.
    (AutoEP gives scores for Qwen3.5, over which the model's auxiliary loss would take a second softmax.)
    """
    if not any(_KEY in _recordable(module) for module in model.modules()):
        return
    for layer in layers:
        if layer.router_logits_capture_target != "moe_block":
            layer.return_router_logits = False
            layer.router.gate.register_forward_hook(lambda _gate, _args, logits: _collect(logits))


def _is_not_about_recorders(record: logging.LogRecord) -> bool:
    return "output-capture registry entry" not in record.getMessage()


def _collect(logits: Tensor) -> None:
    from transformers.utils import output_capturing

    collected = output_capturing._active_collector.get()
    if collected is not None and _KEY in collected:
        collected[_KEY].append(logits)


def _recordable(module: nn.Module) -> dict[str, Any]:
    return getattr(module, "_can_record_outputs", None) or {}
