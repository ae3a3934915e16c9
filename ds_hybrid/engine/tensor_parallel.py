"""Right gradients inside the blocks that AutoTP shards.

A block is a module that holds a row-parallel linear, such as self_attn with its o_proj. What leaves the block is the
sum over the tensor-parallel ranks that this linear makes, so each rank computes one addend, and inside the block every
gradient is that of one addend: the gradient of the block's input, and of each parameter that all ranks hold whole, is
the sum over the ranks. A shard's gradient is whole.

DeepSpeed 0.19.8 sums the input's gradient at each column-parallel linear. That misses what enters the block on another
way (the rotary key of DeepSeek's latent attention), and the parameters that all ranks hold whole behind a
column-parallel linear (q_norm and k_norm of Qwen3) or on such another way: their gradients are averaged. Here the
input's gradient is summed once, where it enters, the column-parallel linears sum nothing, and whole parameters are
summed, whatever their names. (A block with another way out would need more: attention and MLPs have none that is used.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, TensorParallel_Layer
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from ds_hybrid.errors import ConfigError

_SECTION = "tensor_parallel.partition_config"


def sum_gradients_of_blocks(model: nn.Module, group: Any) -> None:
    """Give every block that AutoTP has sharded the gradients of the plain model.

    What shards a layer without a row-parallel sum, such as an output head whose columns are gathered, is left alone.

    Args:
        model: after AutoTP, before its first forward.
        group: the tensor-parallel process group.

    Raises:
        ConfigError: a block whose gradients this rule does not cover.
    """
    modules = dict(model.named_modules())
    rows: dict[str, list[str]] = {}
    for name, module in modules.items():
        if type(module) is LinearAllreduce:
            rows.setdefault(name.rpartition(".")[0], []).append(name)
    problems = [*_problems_of_blocks(modules, rows), *_problems_outside(modules, rows)]
    if problems:
        raise ConfigError(*problems)
    for name, (row,) in rows.items():
        _enter_once(modules[name], modules[row], group)


def refuse_empty_shards(model: nn.Module) -> None:
    """With ZeRO 3, DeepSpeed 0.19.8 hangs in a model of which AutoTP gave some rank no part of a layer.

    Raises:
        ConfigError: on every rank, for the first layer that is shared by fewer ranks than there are.
    """
    for name, module in model.named_modules():
        sizes = getattr(module, "_partition_sizes", None) if isinstance(module, TensorParallel_Layer) else None
        if sizes and 0 in sizes:
            sharing = sum(size > 0 for size in sizes)
            raise ConfigError(
                f"tensor_parallel.autotp_size = {len(sizes)}: {name} has key-value heads for {sharing} ranks, and "
                f"zero_optimization.stage 3 trains no rank without any. Set autotp_size to {sharing} or the stage to 2."
            )


class ColumnLinear(LinearLayer):
    """A column-parallel linear in a block: the gradient of its input is summed where the block is entered."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., H] -> [..., columns of this rank]."""
        output = torch.matmul(input, self.weight.transpose(-1, -2))
        return output if self.bias is None else output + self.bias


class _Entrance(torch.autograd.Function):
    """The identity; the gradient is summed over the ranks of the group."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


def _enter_once(block: nn.Module, row: nn.Module, group: Any) -> None:
    for module in block.modules():
        if type(module) is LinearLayer:
            module.__class__ = ColumnLinear

    def enter(_block: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, _enter_if_trained(group), (args, kwargs))

    block.register_forward_pre_hook(enter, with_kwargs=True)
    for parameter in block.parameters():
        # The row-parallel linear adds its bias after its sum.
        whole = not is_model_parallel_parameter(parameter) and parameter is not row.bias
        # AutoTP sums by itself what a partition_config names with grad_allreduce.
        if whole and parameter.requires_grad and not getattr(parameter, "_ds_grad_allreduce_registered", False):
            parameter.register_hook(lambda gradient: _sum(gradient, group))


def _enter_if_trained(group: Any) -> Callable[[Tensor], Tensor]:
    return lambda values: _Entrance.apply(values, group) if values.requires_grad else values


def _sum(gradient: Tensor, group: Any) -> Tensor:
    """Over the ranks, added in float32 at least."""
    total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).contiguous()
    dist.all_reduce(total, group=group)
    return total.to(gradient.dtype)


def _problems_of_blocks(modules: dict[str, nn.Module], rows: dict[str, list[str]]) -> list[str]:
    problems = []
    for name, own in rows.items():
        if len(own) > 1:
            problems.append(
                f"{_SECTION}: {' and '.join(own)} are row-parallel in one module. "
                "Gradients are summed for modules with one. Shard one of them."
            )
        for inner, module in modules.items():
            if not inner.startswith(f"{name}.") or inner in own:
                continue
            if isinstance(module, TensorParallel_Layer) and not _is_column(module):
                kind = type(module).__name__ + (" with gathered output" if type(module) is LinearLayer else "")
                problems.append(
                    f"{_SECTION}: {inner} becomes a {kind} beside the row-parallel {own[0]}. "
                    "Gradients are right for column-parallel linears without gathered output there. Leave it whole."
                )
    return problems


def _problems_outside(modules: dict[str, nn.Module], rows: dict[str, list[str]]) -> list[str]:
    return [
        f"{_SECTION}: {name} is column-parallel and its module holds no row-parallel linear. "
        "Add one that takes its columns, or leave it whole."
        for name, module in modules.items()
        if _is_column(module) and not any(name.startswith(f"{block}.") for block in rows)
    ]


def _is_column(module: nn.Module) -> bool:
    return type(module) is LinearLayer and not module.gather_output
