"""States by hand, and what each choice does to activations. tests/multirank/test_plan_memory.py has real models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hybrid.plan.candidate import LOSS_CHUNK, Candidate, Workload
from ds_hybrid.plan.memory import MAX_BUCKET, memory, reduce_bucket_size, states
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.routing import read_routing

QWEN = read_model("qwen3_30b_a3b")
WORK = Workload(4096)
BASE = Candidate(16, 1, 8, 1, "two_stage")
DENSE, EXPERTS = QWEN.num_dense_parameters, QWEN.num_expert_parameters


def peak(candidate: Candidate = BASE, work: Workload = WORK, routing: str = "uniform") -> float:
    return memory(QWEN, work, candidate, read_routing(routing, QWEN).demand(candidate.ep_size)).peak


def test_bytes_of_a_parameter_by_stage() -> None:
    """bf16 weight and gradient, float32 master and two moments: 2 + 2 + 12; experts over the 2 ranks that have them."""
    by_stage = [states(QWEN, replace(BASE, zero_stage=stage), value_bytes=2) for stage in range(4)]
    whole, part = DENSE + EXPERTS / 8, DENSE / 16 + EXPERTS / 16
    assert [s.weights for s in by_stage] == pytest.approx([2 * whole] * 3 + [2 * part])
    assert [s.optimizer for s in by_stage] == pytest.approx([12 * whole] + [12 * part] * 3)
    assert [by_stage[stage].gradients for stage in (0, 1, 3)] == pytest.approx([2 * whole, 2 * whole, 2 * part])
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


def test_checkpoints_keep_the_inputs_of_layers() -> None:
    of = memory(QWEN, WORK, replace(BASE, checkpoints=True), read_routing("uniform", QWEN).demand(8))
    inputs = 48 * 4096 * 2048 * 2
    assert inputs < of.activations < 1.1 * inputs


def test_eager_attention_keeps_all_pairs() -> None:
    """Softmax in float32 and its bf16 copy: 6 bytes for each head and pair, less what a fused one keeps."""
    demand = read_routing("uniform", QWEN).demand(8)
    fused = memory(QWEN, WORK, BASE, demand).activations
    eager = memory(QWEN, replace(WORK, attention="eager"), BASE, demand).activations
    assert eager - fused == pytest.approx(48 * 32 * 4096 * 4096 * 6, rel=0.02)


def test_a_loss_in_chunks_has_the_logits_of_a_chunk() -> None:
    demand = read_routing("uniform", QWEN).demand(8)
    whole = memory(QWEN, WORK, BASE, demand).logits
    chunked = memory(QWEN, WORK, replace(BASE, chunked_loss=True), demand).logits
    assert chunked / whole == LOSS_CHUNK / 4096
    assert whole == 4096 * 151936 * (2 + 3 * 4)


def test_skew_costs_memory_where_experts_are_on_several_ranks() -> None:
    assert peak(routing="zipf:1.0") > peak() + 1e9
    lone = replace(BASE, ep_size=1, mode="allgather")
    assert peak(lone, routing="zipf:1.0") == pytest.approx(peak(lone))


def test_alltoall_keeps_the_rows_that_come_back() -> None:
    demand = read_routing("uniform", QWEN).demand(8)
    ours, theirs = (memory(QWEN, WORK, replace(BASE, mode=mode), demand) for mode in ("two_stage", "alltoall"))
    assert theirs.activations - ours.activations > 48 * 4096 * 8 * 2048 * 2
    assert theirs.buffers > ours.buffers


def test_the_peak_is_at_one_end_of_the_backward() -> None:
    """Long sequences are held up by activations and logits, short ones by gradients."""
    demand = read_routing("uniform", QWEN).demand(8)
    long, short = (memory(QWEN, Workload(length), BASE, demand) for length in (8192, 16))
    fixed = [of.states.weights + of.states.optimizer + of.buffers for of in (long, short)]
    assert long.peak - fixed[0] == pytest.approx(long.activations + long.logits)
    assert short.peak - fixed[1] == pytest.approx(short.states.gradients + short.states.reduction)
