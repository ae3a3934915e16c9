"""Where the elements of a parameter lie on this rank: its weights, its fp32 master and its optimizer state.

Every optimizer of DeepSpeed's steps some tensor of its own, of which a parameter owns a run: the parameter itself
(ZeRO 0 in fp32), a master of the same shape or a flat buffer of masters (ZeRO 0 in low precision), or this rank's
partition of such a buffer (ZeRO 1 to 3, and bf16 with fp32 gradients). Whatever the optimizer keeps for each element of
that tensor lies at the same place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor

from ds_hybrid.errors import PlacementError


@dataclass(frozen=True)
class Fragment:
    """A run of a flattened parameter's elements, or of what is kept for each of them.

    Attributes:
        values: [n], a live view: what is written there is trained with.
        start: the first element's index in the flattened parameter.
    """

    values: Tensor
    start: int


@dataclass(frozen=True)
class _Stepped:
    """The tensor that the optimizer steps, and which run of it is which run of a parameter."""

    tensor: Tensor
    offset: int
    start: int
    length: int


class StateFinder:
    """Finds the state of a model's parameters, as of now, under any of DeepSpeed's optimizers.

    Args:
        optimizer: ``engine.optimizer``; None when nothing trains.
    """

    def __init__(self, optimizer: Any) -> None:
        self._wrapper = optimizer
        self._inner = getattr(optimizer, "optimizer", optimizer)
        self._masters = dict(_masters_of_unpartitioned(optimizer))
        self._places = dict(_places_in_flat_groups(optimizer))

    def fragments(self, parameter: Tensor) -> dict[str, Fragment]:
        """By name: "weights", "gathered" (ZeRO-3, while whole on every rank), "master", and the optimizer's own keys.

        Raises:
            PlacementError: the optimizer keeps something that is neither for each element nor one number.
        """
        found = dict(_weights(parameter))
        stepped = self._stepped(parameter)
        if stepped is None:
            return found
        if stepped.tensor is not parameter:
            found["master"] = _run(stepped.tensor, stepped)
        for name, value in self._state(stepped.tensor).items():
            if isinstance(value, Tensor) and value.numel() == stepped.tensor.numel() and value.ndim:
                found[name] = _run(value, stepped)
            elif isinstance(value, Tensor) and value.numel() > 1:
                raise PlacementError(
                    f"{type(self._inner).__name__} keeps {name!r} of shape {list(value.shape)} for a tensor of "
                    f"{list(stepped.tensor.shape)}: experts cannot move with it. Choose an optimizer that keeps a "
                    "value for each element, or set ds_hybrid.rebalance.enabled to false."
                )
        return found

    def numbers(self, parameter: Tensor) -> dict[str, float]:
        """What the optimizer keeps once for the whole parameter, such as Adam's "step"."""
        stepped = self._stepped(parameter)
        state = {} if stepped is None else self._state(stepped.tensor)
        scalars = {name: value for name, value in state.items() if not isinstance(value, Tensor) or not value.ndim}
        return {name: float(value) for name, value in scalars.items() if isinstance(value, int | float | Tensor)}

    def _state(self, tensor: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._inner.state.get(tensor, {})
        return state

    def _stepped(self, parameter: Tensor) -> _Stepped | None:
        if self._inner is None or not parameter.requires_grad:
            return None
        if hasattr(parameter, "ds_id"):
            group, offset, _ = self._wrapper.grad_position[parameter.ds_id]
            start, length = _shard(parameter)
            return _Stepped(self._wrapper.fp32_partitioned_groups_flat[group], offset, start, length)
        if parameter in self._places:
            return self._part_of_flat_group(parameter, *self._places[parameter])
        if hasattr(parameter, "_hp_mapping"):
            mapping: Any = parameter._hp_mapping
            if mapping is None:
                return None
            in_flat, in_parameter = mapping.hp_fragment_address, mapping.lp_fragment_address
            flat = self._partition_with(mapping.hp_fragment)
            return _Stepped(flat, in_flat.start, in_parameter.start, in_parameter.numel)
        tensor, offset = self._masters.get(parameter, (parameter, 0))
        return _Stepped(tensor, offset, 0, parameter.numel())

    def _part_of_flat_group(self, parameter: Tensor, group: int, offset: int) -> _Stepped | None:
        size = self._wrapper.partition_size[group]
        begin = size * dist.get_rank(group=self._wrapper.real_dp_process_group[group])
        first, last = max(offset, begin), min(offset + parameter.numel(), begin + size)
        if first >= last:
            return None
        flat = self._wrapper.single_partition_of_fp32_groups[group]
        return _Stepped(flat, first - begin, first - offset, last - first)

    def _partition_with(self, fragment: Tensor) -> Tensor:
        where = fragment.untyped_storage().data_ptr()
        stepped = chain.from_iterable(group["params"] for group in self._inner.param_groups)
        found: Tensor = next(flat for flat in stepped if flat.untyped_storage().data_ptr() == where)
        return found


def _masters_of_unpartitioned(optimizer: Any) -> Iterator[tuple[Tensor, tuple[Tensor, int]]]:
    """Each low-precision parameter's master, and where it begins there, under DeepSpeed's optimizers of ZeRO 0."""
    if hasattr(optimizer, "fp32_groups"):
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        for parameters, masters in pairs:
            yield from ((p, (master, 0)) for p, master in zip(parameters, masters, strict=True))
    elif hasattr(optimizer, "fp32_groups_flat") and hasattr(optimizer, "fp16_groups"):
        for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            offset = 0
            for parameter in parameters:
                yield parameter, (flat, offset)
                offset += parameter.numel()


def _places_in_flat_groups(optimizer: Any) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    """The group of each parameter and its first element there, under ZeRO 1 and 2.

    Not from ``_hp_mapping``: with round_robin_gradients, DeepSpeed 0.19.8 fills that in another order than it stores.
    """
    groups = getattr(optimizer, "round_robin_bit16_groups", [])
    for number, parameters in enumerate(groups):
        offsets = optimizer.round_robin_bit16_offsets[number]
        yield from ((p, (number, offset)) for p, offset in zip(parameters, offsets, strict=True))


def _weights(parameter: Any) -> Iterator[tuple[str, Fragment]]:
    if not hasattr(parameter, "ds_id"):
        yield "weights", Fragment(parameter.detach().view(-1), 0)
        return
    start, length = _shard(parameter)
    yield "weights", Fragment(parameter.ds_tensor.detach().view(-1)[:length], start)
    if parameter.ds_status == ZeroParamStatus.AVAILABLE:
        yield "gathered", Fragment(parameter.detach().view(-1), 0)


def _shard(parameter: Any) -> tuple[int, int]:
    """The first element of ZeRO-3's shard on this rank, and how many there are but for the padding at the end."""
    size = parameter.ds_tensor.ds_numel
    start = dist.get_rank(group=parameter.ds_process_group) * size
    return start, max(0, min(size, parameter.ds_numel - start))


def _run(tensor: Tensor, stepped: _Stepped) -> Fragment:
    return Fragment(tensor.detach().view(-1)[stepped.offset : stepped.offset + stepped.length], stepped.start)


def num_elements(parameter: Any) -> int:
    """Of the whole parameter, sharded by ZeRO-3 or not."""
    return int(getattr(parameter, "ds_numel", None) or torch.numel(parameter))
