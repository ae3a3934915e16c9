"""One rank alone, what is refused, and autograd's ways; real ranks are in tests/multirank/test_kv_gather.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ds_hybrid.attention.blocks import PlainKernel
from ds_hybrid.attention.choose import AttentionShape, Schedule
from ds_hybrid.attention.kv_gather import KVGatherAttention
from ds_hybrid.attention.traffic import KVShape
from ds_hybrid.dispatch.collectives import LoneRank
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.errors import ConfigError
from tests.attention.reference import Case, Result, full_attention, make_tensors

CASE = Case(60, num_kv_heads=2, documents="packed")
SCHEDULES = {"whole": Schedule("whole"), "blocks": Schedule("blocks"), "ring": Schedule("ring")}


def attention(schedule: str = "ring") -> KVGatherAttention:
    return KVGatherAttention(LoneRank(Meter()), SCHEDULES[schedule])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_rank_alone_is_full_attention(schedule: str) -> None:
    tensors = make_tensors(CASE)
    inputs = [x.requires_grad_() for x in (tensors.query, tensors.key, tensors.value)]
    lone = KVGatherAttention(LoneRank(Meter()), SCHEDULES[schedule], kernel=PlainKernel())
    for one in (lone, attention(schedule)):
        output = one(*inputs, CASE.sight(1, 0))
        found = Result(output.detach(), *torch.autograd.grad(output, inputs, tensors.grad_output))
        assert max(found.errors(full_attention(CASE, tensors)).values()) <= 1e-12
        assert one.group.meter.take().payload == 0


def test_recomputation_and_layouts_change_nothing() -> None:
    """Under activation checkpointing, and with heads after tokens in memory, as models have them."""
    tensors = make_tensors(CASE)
    expected = full_attention(CASE, tensors)
    inputs = [
        x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for x in (tensors.query, tensors.key, tensors.value)
    ]
    output = checkpoint(lambda *x: attention("blocks")(*x, CASE.sight(1, 0)), *inputs, use_reentrant=False)
    found = Result(output.detach(), *torch.autograd.grad(output, inputs, tensors.grad_output))
    assert max(found.errors(expected).values()) <= 1e-12


def test_scale_is_that_of_the_call() -> None:
    tensors = make_tensors(CASE)
    scaled = attention()(2 * tensors.query, tensors.key, tensors.value, CASE.sight(1, 0), scale=CASE.head_dim**-0.5 / 2)
    torch.testing.assert_close(scaled, full_attention(CASE, tensors).output, rtol=1e-12, atol=1e-12)


def test_a_schedule_is_asked_for_by_size_and_dtype() -> None:
    """Of the layer as it is, keys on the wire as they travel."""
    asked = []

    def schedule(layer: AttentionShape, dtype: torch.dtype) -> Schedule:
        asked.append((layer, dtype))
        return SCHEDULES["blocks"]

    picked = KVGatherAttention(LoneRank(Meter()), schedule, wire_dtype="fp8_e4m3")
    for case in (CASE, replace(CASE, num_tokens=64, window=9, value_head_dim=6)):
        tensors = make_tensors(case)
        found = picked(tensors.query, tensors.key, tensors.value, case.sight(1, 0))
        torch.testing.assert_close(found, full_attention(case, tensors).output, rtol=1e-12, atol=1e-12)
        kv = KVShape(1, *tensors.key.shape[:1], case.num_tokens, 2, case.head_dim, case.value_head_dim, 8, "fp8_e4m3")
        assert asked.pop() == (AttentionShape(kv, case.num_heads, case.causal, case.window), torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autocast_rounds_what_comes_in_and_nothing_else(schedule: str, dtype: torch.dtype) -> None:
    tensors = make_tensors(CASE).to(torch.float32)
    inputs = [x.requires_grad_() for x in (tensors.query, tensors.key, tensors.value)]
    rounded = [x.detach().to(dtype).requires_grad_() for x in inputs]
    upstream = tensors.grad_output.to(dtype)
    expected = attention(schedule)(*rounded, CASE.sight(1, 0))
    expected_gradients = torch.autograd.grad(expected, rounded, upstream)
    with torch.autocast("cpu", dtype=dtype):
        found = attention(schedule)(inputs[0], inputs[1], inputs[2].to(dtype), CASE.sight(1, 0))
        gradients = torch.autograd.grad(found, inputs, upstream)
    assert found.dtype == dtype
    assert found.equal(expected)
    assert all(ours.to(dtype).equal(theirs) for ours, theirs in zip(gradients, expected_gradients, strict=True))


def test_what_is_refused() -> None:
    tensors, sight = make_tensors(CASE), CASE.sight(1, 0)
    query, key, value = tensors.query, tensors.key, tensors.value
    with pytest.raises(ConfigError, match=r"dropout 0.1: must be 0 .* Set attention_dropout to 0"):
        attention()(query, key, value, sight, dropout=0.1)
    with pytest.raises(ConfigError, match=r"key \[2, 2, 59, 16\] torch.float64.*must be query \[B, H, 60, D\]"):
        attention()(query, key[:, :, 1:], value, sight)
    with pytest.raises(ConfigError, match="of one dtype"):
        attention()(query, key.float(), value, sight)
    with pytest.raises(ConfigError, match=r"that of the documents \(2\)"):
        attention()(*(x.repeat(2, 1, 1, 1) for x in (query, key, value)), sight)
    with pytest.raises(ConfigError, match="over 2 ranks, seen by rank 1, in a group of 1 as rank 0"):
        attention()(*(x[:, :, :30] for x in (query, key, value)), CASE.sight(2, 1))
