"""What is kept for backward, and the largest tensor that is ever made, grow with the length and not with its square."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hybrid.attention.choose import Clock, Schedule
from ds_hybrid.attention.kv_gather import KVGatherAttention
from ds_hybrid.attention.masks import MASK_ROWS
from ds_hybrid.attention.traffic import KVShape, gathered_bytes
from ds_hybrid.dispatch.predict import GroupSpeed
from tests.attention.mirror import Mirror
from tests.attention.reference import Case, make_tensors

NUM_RANKS = 4
LENGTHS = (1024, 2048, 4096)
CASES = {
    "causal": Case(1, batch_size=1, num_heads=4, num_kv_heads=1),
    "window": Case(1, batch_size=1, num_heads=4, num_kv_heads=1, window=300),
    "packed": Case(1, batch_size=2, num_heads=4, num_kv_heads=1, documents="packed"),
}
SCHEDULES = {
    "whole": Schedule("whole"),
    "blocks": Schedule("blocks"),
    "blocks, all kept": Schedule("blocks", keep_bytes=2**40),
    "ring": Schedule("ring"),
}


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operator gives while it is on."""

    num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return result


def run(case: Case, schedule: Schedule) -> tuple[int, int]:
    """Bytes kept for backward, each storage once, and the largest tensor of both passes."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    group = Mirror(NUM_RANKS, 1, Clock(GroupSpeed(0.0, 1.0)))
    attention = KVGatherAttention(group, schedule)
    local = make_tensors(case).to(torch.float32).shard(case.shards(NUM_RANKS), 1)
    inputs = [x.requires_grad_() for x in (local.query, local.key, local.value)]
    sight = case.sight(NUM_RANKS, 1)
    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = attention(*inputs, sight)
        output.backward(local.grad_output)
    return sum(saved.values()), largest.num_bytes


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_grows_with_the_length(schedule: str, case: str) -> None:
    saved, largest = zip(
        *(run(replace(CASES[case], num_tokens=length), SCHEDULES[schedule]) for length in LENGTHS), strict=True
    )
    one = replace(CASES[case], num_tokens=LENGTHS[0])
    for length, num_bytes in zip(LENGTHS, saved, strict=True):
        assert num_bytes == kept_bytes(replace(one, num_tokens=length), SCHEDULES[schedule])
    # A tile's mask or scores do not grow at all; all else is a shard, or a piece of every shard.
    tile = one.batch_size * max(MASK_ROWS**2 * 8, 512**2 * 4 * one.num_heads if schedule == "whole" else 0)
    for length, num_bytes in zip(LENGTHS, largest, strict=True):
        gathered = gathered_bytes(kv_shape(replace(one, num_tokens=length)))
        assert num_bytes <= max(tile, gathered)


def kv_shape(case: Case) -> KVShape:
    length = case.shards(NUM_RANKS).shard_length
    return KVShape(NUM_RANKS, case.batch_size, length, case.num_kv_heads, case.head_dim, case.value_head_dim, 4)


def kept_bytes(case: Case, schedule: Schedule) -> int:
    """Queries, keys, values, output and a logarithm for each query; and what the schedule keeps of others."""
    length = case.shards(NUM_RANKS).shard_length
    heads = case.num_heads * (case.head_dim + case.value_head_dim + 1)
    shared = case.num_kv_heads * (case.head_dim + case.value_head_dim)
    keeps = schedule.variant == "whole" or schedule.keep_bytes
    return case.batch_size * length * (heads + shared) * 4 + (gathered_bytes(kv_shape(case)) if keeps else 0)
