"""What a meter adds up, for which mode, and once where activation checkpointing runs a forward again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_hybrid.dispatch.meter import Meter, WireBytes, crossing
from ds_hybrid.dispatch.spans import is_in_backward

NOTHING = WireBytes(
    payload=0,
    metadata=0,
    by_mode={},
    lower_bound=0,
    num_tokens=0,
    num_arrived=0,
    exposed_seconds=0.0,
    expert_seconds=0.0,
)


def test_bytes_go_to_the_mode_that_sent_them() -> None:
    meter = Meter()
    meter.add_payload(100)
    meter.mode = "two_stage"
    meter.add_metadata(7)
    meter.add_payload(20)
    meter.mode = "hierarchical"
    meter.mode = "alltoall"
    meter.add_metadata(3)
    taken = meter.take()
    assert taken == replace(NOTHING, payload=120, metadata=10, by_mode={"alltoall": 103, "two_stage": 27})
    assert sum(taken.by_mode.values()) == taken.payload + taken.metadata


def test_take_starts_anew_and_what_was_taken_stays() -> None:
    meter = Meter("allgather")
    assert meter.take() == NOTHING
    for _ in range(2):
        meter.add_payload(5)
        meter.add_metadata(4)
        meter.add_tokens(3)
        meter.add_arrived(2)
        meter.add_lower_bound(torch.tensor(1))
    first = meter.take()
    expected = replace(
        NOTHING, payload=10, metadata=8, by_mode={"allgather": 18}, lower_bound=2, num_tokens=6, num_arrived=4
    )
    assert first == expected
    meter.add_payload(50)
    assert first == expected
    assert meter.take() == replace(NOTHING, payload=50, by_mode={"allgather": 50})
    assert meter.mode == "allgather"
    assert meter.take() == NOTHING


ROW_BYTES = 6 * 2
"""Of a row of 6 bfloat16 values."""


@pytest.mark.parametrize(
    ("checkpointing", "num_crossings"),
    [("off", 2), ("reentrant", 3), ("non_reentrant", 3)],  # a recomputation sends the rows a third time
)
def test_a_crossing_counts_whenever_rows_cross(checkpointing: str, num_crossings: int) -> None:
    meter, calls = Meter(), []

    def layer(rows: Tensor) -> Tensor:
        calls.append(is_in_backward())
        crossed = crossing(rows, torch.tensor(4), meter)
        return crossed.sin()

    rows = torch.randn(9, 6, dtype=torch.bfloat16, requires_grad=True)
    if checkpointing == "off":
        output = layer(rows)
    else:
        output = checkpoint(layer, rows, use_reentrant=checkpointing == "reentrant")
    assert not is_in_backward()
    output.backward(torch.ones_like(output))
    assert not is_in_backward()
    assert calls == [False, True][: len(calls)]
    assert len(calls) == num_crossings - 1
    assert torch.equal(rows.grad, rows.detach().cos())
    assert meter.take() == replace(NOTHING, lower_bound=num_crossings * 4 * ROW_BYTES)


def test_a_forward_without_gradients_crosses_once() -> None:
    meter = Meter()
    with torch.no_grad():
        crossing(torch.randn(9, 6, dtype=torch.bfloat16), torch.tensor(4), meter)
    assert meter.take().lower_bound == 4 * ROW_BYTES


def test_frozen_rows_cross_without_a_gradient() -> None:
    meter = Meter()
    weight = torch.ones(6, requires_grad=True)
    (crossing(torch.randn(9, 6), torch.tensor(4), meter) * weight).sum().backward()
    assert meter.take().lower_bound == 4 * 6 * 4


def test_training_is_told_apart_from_evaluation_and_backward_is_training() -> None:
    meter = Meter()
    rows = torch.ones(1, 4, requires_grad=True)
    crossed = crossing(rows, torch.tensor(1), meter)
    meter.add_payload(100)
    meter.add_tokens(3)
    meter.begin(training=False)
    meter.add_payload(50)
    meter.add_metadata(7)
    meter.add_tokens(2)
    meter.add_lower_bound(torch.tensor(1000))
    crossed.sum().backward()  # of the forward before the evaluation
    assert meter.training_total() == replace(
        NOTHING, payload=100, by_mode={"alltoall": 100}, num_tokens=3, lower_bound=2 * 16
    )
    total = replace(
        NOTHING, payload=150, metadata=7, by_mode={"alltoall": 157}, num_tokens=5, lower_bound=2 * 16 + 1000
    )
    assert meter.total() == total
    assert meter.take() == total
    assert meter.take() == NOTHING
