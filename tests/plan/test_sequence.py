"""Ranks that share out sequences, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hybrid.dispatch.predict import GroupSpeed
from ds_hybrid.plan.candidate import Workload
from ds_hybrid.plan.machine import read_machine
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.sequence import shared_out
from ds_hybrid.plan.time import StepTime

QWEN = read_model("qwen3_30b_a3b")
A100 = read_machine("a100x8_ib200")
WHOLE = StepTime(
    dense=8.0,
    experts=4.0,
    memory_bound=2.0,
    dispatch=0.0,
    tensor_parallel=0.0,
    reduction=0.5,
    gathers=0.25,
    optimizer=1,
)


def shared(seq_len: int, *, hides: bool, checkpoints: bool = False, flops: float = 1e14) -> StepTime:
    return shared_out(
        WHOLE,
        QWEN,
        Workload(seq_len),
        replace(A100, matmul_flops=flops),
        GroupSpeed(1e-5, 1e11),
        num_shards=4,
        hides=hides,
        checkpoints=checkpoints,
    )


@pytest.mark.parametrize(("checkpoints", "passes"), [(False, 2), (True, 3)])
def test_gathers_that_are_waited_for(checkpoints: bool, passes: int) -> None:
    """K and V of 4 heads x 128 in bf16; a rank gets three quarters of them from others."""
    step = shared(8192, hides=False, checkpoints=checkpoints)
    gather = 1e-5 + 8192 * 2 * 4 * 128 * 2 * 0.75 / 1e11
    assert step.tensor_parallel == pytest.approx(48 * passes * gather)
    assert (step.dense, step.experts, step.memory_bound) == (2.0, 1.0, 0.5)
    assert (step.reduction, step.gathers, step.optimizer, step.hidden) == (0.5, 0.25, 1, 0.0)


def test_all_hides_under_long_attention_and_little_under_a_fast_one() -> None:
    waited = shared(8192, hides=False).tensor_parallel
    slow = shared(8192, hides=True)
    assert slow.tensor_parallel == pytest.approx(0.0, abs=1e-12)
    assert slow.hidden == pytest.approx(waited)
    fast = shared(8192, hides=True, flops=1e18)
    # Scores and values, causal: 2 * 32 heads * 256 * 8192 / 2 FLOPs of 2048 tokens; three of four blocks; 1 + 2.
    beside = 48 * 3 * 2048 * (2 * 32 * 256 * 8192 / 2) / 1e18 * 0.75
    assert fast.hidden == pytest.approx(beside)
    assert fast.tensor_parallel == pytest.approx(waited - beside)
