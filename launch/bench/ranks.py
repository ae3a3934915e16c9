"""How a benchmark runs on its ranks: start and end, and what they tell each other."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import set_log_level_from_string
from results import settings

from ds_hybrid.errors import HybridError

Value = TypeVar("Value")


def run_on_ranks(script: str, run: Callable[[torch.device, dict[str, Any]], None]) -> int:
    """Join the other ranks, and run.

    Args:
        script: how messages call it.
        run: takes this rank's device, and the settings that a report names.

    Returns:
        The exit code: 2, after one message from rank 0, where ``run`` raises a ``HybridError`` on every rank.
    """
    set_log_level_from_string("error")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    accelerator = get_accelerator()
    backend = accelerator.communication_backend_name()
    deepspeed.init_distributed(backend, verbose=False)
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device(accelerator.current_device_name())
    if device.type == "cpu":
        # More would spin while they wait, and that counts as CPU time.
        torch.set_num_threads(1)
    try:
        run(device, settings(device, backend))
    except HybridError as error:
        if dist.get_rank() == 0:
            print(f"launch/bench/{script}: {error}", file=sys.stderr, flush=True)
        code = 2
    else:
        code = 0
    dist.destroy_process_group()
    return code


def attempt(function: Callable[[], Value]) -> Value | str:
    """What the function returns, or on every rank what it raised on some rank."""
    value, problem = None, None
    try:
        value = function()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    problems = [text for text in gathered(problem) if text is not None]
    return problems[0] if problems else cast(Value, value)


def gathered(value: Value) -> list[Value]:
    """What every rank has, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
