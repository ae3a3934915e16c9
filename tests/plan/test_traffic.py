"""Bytes by hand: what gradients, weights and sharded attention send; real trainings are counted in tests/multirank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hybrid.dispatch.predict import GroupSpeed
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.traffic import Sent, all_gather, all_reduce, tensor_parallel_traffic, zero_traffic

QWEN = read_model("qwen3_30b_a3b")
WORK = Workload(4096)
BASE = Candidate(16, 1, 8, 1, "two_stage", micro_batches=3)


def test_rings() -> None:
    assert all_gather(800, 4) == Sent(1, 600)
    assert all_reduce(800, 4) == Sent(2, 1200)
    assert (all_gather(800, 4) * 3 + Sent(1, 2)).seconds(GroupSpeed(0.5, 100.0)) == 4 * 0.5 + 1802 / 100


def test_zero_by_stage() -> None:
    """Of a parameter in 16 bits: gradients of three micro-batches, and weights that are gathered."""
    dense = 2 * QWEN.num_dense_parameters * 15 / 16
    experts = 2 * QWEN.num_expert_parameters / 8 / 2
    times = {0: (2, 0), 1: (2, 1), 2: (6, 1), 3: (3, 6)}
    for stage, (reductions, gathers) in times.items():
        sent = zero_traffic(QWEN, WORK, replace(BASE, zero_stage=stage))
        assert [kind.reduction.num_bytes for kind in sent] == pytest.approx([reductions * dense, reductions * experts])
        assert [kind.gathers.num_bytes for kind in sent] == pytest.approx([gathers * dense, gathers * experts])
    _, alone = zero_traffic(QWEN, WORK, replace(BASE, ep_size=16))
    assert alone.reduction == alone.gathers == Sent()
    recomputed, _ = zero_traffic(QWEN, WORK, replace(BASE, zero_stage=3, checkpoints=True))
    assert recomputed.gathers.num_messages == 3 * 3 * QWEN.num_layers


def test_ranks_without_tensor_parallelism_send_nothing_for_it() -> None:
    assert tensor_parallel_traffic(QWEN, WORK, BASE) == Sent()
    shared = tensor_parallel_traffic(QWEN, WORK, replace(BASE, tp_size=2))
    replicated = tensor_parallel_traffic(QWEN, WORK, replace(BASE, tp_size=2, ep_size=2, mode="replicated"))
    # Two gathers of tokens and one of routing weights join what the ranks of a group did apart, in three micro-batches.
    joined = 3 * 48 * 4096 * (2 * 2048 * 2 + 8 * 4) / 2
    assert shared.num_bytes - replicated.num_bytes == pytest.approx(joined)


def test_gradients_of_what_is_whole_are_averaged_once_or_with_every_micro_batch() -> None:
    once, thrice = (
        tensor_parallel_traffic(QWEN, WORK, replace(BASE, tp_size=2, zero_stage=stage)).num_bytes for stage in (1, 2)
    )
    assert thrice - once == pytest.approx(2 * 4 * QWEN.num_whole_parameters)
