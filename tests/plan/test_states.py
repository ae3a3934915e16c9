"""States by hand. tests/multirank/test_plan_memory.py has real models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hybrid.plan.candidate import Candidate
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.states import MAX_BUCKET, reduce_bucket_size, states

QWEN = read_model("qwen3_30b_a3b")
BASE = Candidate(16, 1, 8, 1, "two_stage")
DENSE, EXPERTS = QWEN.num_dense_parameters, QWEN.num_expert_parameters


def test_bytes_of_a_parameter_by_stage() -> None:
    """bf16 weight and gradient, float32 master and two moments: 2 + 2 + 12; experts over the 2 ranks that have them."""
    by_stage = [states(QWEN, replace(BASE, zero_stage=stage), value_bytes=2) for stage in range(4)]
    whole, part = DENSE + EXPERTS / 8, DENSE / 16 + EXPERTS / 16
    assert [s.weights for s in by_stage] == pytest.approx([2 * whole] * 3 + [2 * part])
    assert [s.optimizer for s in by_stage] == pytest.approx([12 * whole] + [12 * part] * 3)
    assert [by_stage[stage].gradients for stage in (0, 1)] == pytest.approx([2 * whole, 2 * whole])
    assert by_stage[3].buffers == pytest.approx(2 * part + 2 * MAX_BUCKET)
    assert 2 * part < by_stage[2].gradients < 1.5 * 2 * part + 2 * QWEN.vocab_size * QWEN.hidden_size


def test_float32_has_a_master_from_stage_1_on() -> None:
    first, second = (states(QWEN, replace(BASE, zero_stage=stage), value_bytes=4).optimizer for stage in (0, 1))
    assert first == pytest.approx(8 * (DENSE + EXPERTS / 8))
    assert second == pytest.approx(12 * (DENSE + EXPERTS) / 16)


def test_tensor_parallelism_shards_attention_alone() -> None:
    sharded = states(QWEN, replace(BASE, tp_size=4, zero_stage=0), value_bytes=2).weights
    saved = QWEN.num_sharded_parameters * 3 / 4
    assert states(QWEN, replace(BASE, zero_stage=0), value_bytes=2).weights - sharded == pytest.approx(2 * saved)


def test_a_bucket_is_no_larger_than_the_gradients() -> None:
    tiny = read_model("tiny_qwen3_moe")
    assert reduce_bucket_size(QWEN, BASE) == MAX_BUCKET
    assert reduce_bucket_size(tiny, Candidate(2, 1, 1, 1, "allgather")) == tiny.num_parameters
