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
    assert whole == 4096 * 151936 * 3 * 4


def test_skew_costs_memory_where_experts_are_on_several_ranks() -> None:
    assert peak(routing="zipf:1.0") > peak() + 1e9
    lone = replace(BASE, ep_size=1, mode="allgather")
    assert peak(lone, routing="zipf:1.0") == pytest.approx(peak(lone))


def test_alltoall_keeps_the_rows_that_come_back() -> None:
    demand = read_routing("uniform", QWEN).demand(8)
    ours, theirs = (memory(QWEN, WORK, replace(BASE, mode=mode), demand) for mode in ("two_stage", "alltoall"))
    assert theirs.activations - ours.activations > 48 * 4096 * 8 * 2048 * 2
    assert theirs.layer > ours.layer


def test_the_peak_is_at_one_end_of_the_backward() -> None:
    """Long sequences are held up by activations and logits, short ones by gradients, a small vocabulary by a layer."""
    demand = read_routing("uniform", QWEN).demand(8)
    few_words = replace(QWEN, vocab_size=256)
    long, short, plain = (
        memory(model, Workload(length), BASE, demand) for model, length in ((QWEN, 8192), (QWEN, 16), (few_words, 8192))
    )
    rest = [of.peak - of.states.weights - of.states.optimizer for of in (long, short, plain)]
    assert rest[0] == pytest.approx(long.activations + long.logits)
    assert rest[1] == pytest.approx(short.layer + short.states.gradients + short.states.reduction)
    assert rest[2] == pytest.approx(plain.activations + plain.layer)


def test_what_zero_3_gathers_is_there_in_backward_but_not_in_the_step() -> None:
    demand = read_routing("uniform", QWEN).demand(8)
    whole = memory(QWEN, Workload(8192), replace(BASE, zero_stage=3), demand)
    states = whole.states
    in_backward = states.weights + states.optimizer + states.buffers + whole.activations + whole.logits + whole.gathered
    assert whole.gathered > 1e9
    assert whole.peak == pytest.approx(in_backward)
    idle = replace(whole, activations=0.0, logits=0.0, layer=0.0, gathered=0.0)
    assert idle.peak == pytest.approx(states.weights + states.optimizer + states.buffers + states.step)
