"""What each choice does to activations, logits and buffers. tests/multirank/test_plan_memory.py has real models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hybrid.plan.candidate import LOSS_CHUNK, Candidate, Workload
from ds_hybrid.plan.memory import memory
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.routing import read_routing

QWEN = read_model("qwen3_30b_a3b")
WORK = Workload(4096)
BASE = Candidate(16, 1, 8, 1, "two_stage")


def peak(candidate: Candidate = BASE, work: Workload = WORK, routing: str = "uniform") -> float:
    return memory(QWEN, work, candidate, read_routing(routing, QWEN).demand(candidate.ep_size)).peak


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
