"""What is measured for the layers of a model, and how often; real links: tests/multirank/test_sequence_parallel.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_hybrid.attention import scheduler
from ds_hybrid.attention.choose import AttentionShape, Schedule, choose
from ds_hybrid.attention.scheduler import Scheduler
from ds_hybrid.attention.traffic import KVShape
from ds_hybrid.dispatch.collectives import LoneRank
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.predict import GroupSpeed

LAYER = AttentionShape(KVShape(4, 2, 1024, 4, 64, 64, value_bytes=2), num_heads=8, causal=True)
LONGER = replace(LAYER, kv=replace(LAYER.kv, shard_length=16384))
SPEED = GroupSpeed(latency=1e-5, bandwidth=1e9)
FLOPS = {torch.bfloat16: 1e12, torch.float16: 1e10}
MEMORY_BYTES = 2**26


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was measured, in order, instead of measuring."""
    log: list[Any] = []

    def link(_group: Any) -> GroupSpeed:
        log.append("link")
        return SPEED

    def flops(_group: Any, dtype: torch.dtype) -> float:
        log.append(dtype)
        return FLOPS[dtype]

    monkeypatch.setattr(scheduler, "_measured_link", link)
    monkeypatch.setattr(scheduler, "_measured_flops", flops)
    return log


def expected(layer: AttentionShape, dtype: torch.dtype) -> Schedule:
    return choose("auto", layer, speed=SPEED, matmul_flops=FLOPS[dtype], memory_bytes=MEMORY_BYTES)[0]


def test_links_once_and_products_once_for_each_dtype(measured: list[Any]) -> None:
    pick = Scheduler(LoneRank(Meter()), "auto", memory_bytes=MEMORY_BYTES)
    assert measured == ["link"]
    for _ in range(2):
        for layer in (LAYER, LONGER):
            for dtype in FLOPS:
                assert pick(layer, dtype) == expected(layer, dtype)
    assert measured == ["link", *FLOPS]


def test_layers_of_one_shape_and_two_dtypes_are_not_mixed_up(measured: list[Any]) -> None:
    quick, slow = (expected(LAYER, dtype) for dtype in FLOPS)
    assert quick != slow
    pick = Scheduler(LoneRank(Meter()), "auto", memory_bytes=MEMORY_BYTES)
    assert [pick(LAYER, dtype) for dtype in FLOPS] == [quick, slow]
