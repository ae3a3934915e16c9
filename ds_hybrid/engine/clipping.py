"""The gradient norm of a model whose experts differ between ranks.

DeepSpeed 0.19.8 without ZeRO and mixed precision averages the ranks' norms, which is right only for parameters that
all ranks share (deepspeedai/DeepSpeed issue 8475). The norm here is that of the whole model's gradient, experts of all
ranks included, so every rank clips by the same factor.
"""

from __future__ import annotations

from collections.abc import Iterable

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from torch import Tensor, nn

_SHARED = ""
"""Stands for the parameters that every rank holds whole."""

_SHARDS = "tensor-parallel shards"
"""Stands for the parameters of which every rank of a tensor-parallel group holds a part."""


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients in place so that their global 2-norm is at most ``max_norm``. Collective.

    Returns:
        The norm before clipping, [] float32, equal on all ranks.
    """
    of_group: dict[str, list[nn.Parameter]] = {_SHARED: []}
    for parameter in parameters:
        of_group.setdefault(_kind(parameter), []).append(parameter)
    squares = {name: _sum_of_squares(members) for name, members in of_group.items()}
    for name in sorted(squares.keys() - {_SHARED}):
        sharded = name == _SHARDS
        group = groups.get_tensor_model_parallel_group() if sharded else groups._get_expert_parallel_group(name)
        dist.all_reduce(squares[name], group=group)
    norm = torch.stack(list(squares.values())).sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in (p for members in of_group.values() for p in members):
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return norm


def _kind(parameter: nn.Parameter) -> str:
    """DeepSpeed's name of the group over which an expert's peers lie, or _SHARDS, or _SHARED."""
    if is_moe_param(parameter):
        return str(parameter.group_name)  # type: ignore[attr-defined]
    return _SHARDS if is_model_parallel_parameter(parameter) else _SHARED


def _sum_of_squares(parameters: Iterable[nn.Parameter]) -> Tensor:
    total = torch.zeros((), device=get_accelerator().current_device_name())
    for parameter in parameters:
        if parameter.grad is not None:
            total += parameter.grad.float().norm().square()
    return total
