"""Ranks that share out sequences, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hybrid.dispatch.predict import GroupSpeed
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.machine import read_machine
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.sequence import Gathers, gathers

QWEN = read_model("qwen3_30b_a3b")
A100 = read_machine("a100x8_ib200")
SPEED = GroupSpeed(0.0, 1e11)
KV_BYTES = 2 * 4 * 128 * 2
"""Of a token: keys and values of 4 heads x 128 in bf16."""


def of(sp_size: int = 4, *, flops: float = 1e14, checkpoints: bool = False, seq_len: int = 8192) -> Gathers:
    candidate = Candidate(16, 1, 8, 1, "two_stage", checkpoints, sp_size=sp_size)
    return gathers(QWEN, Workload(seq_len), candidate, replace(A100, matmul_flops=flops), SPEED)


def test_nothing_travels_where_sequences_are_whole() -> None:
    assert of(1) == Gathers()


@pytest.mark.parametrize(("checkpoints", "num_forwards"), [(False, 1), (True, 2)])
def test_what_leaves_a_rank(checkpoints: bool, num_forwards: int) -> None:
    """Forward sends the shard to three ranks; backward sends it again, and as much of gradients home."""
    gathered = of(checkpoints=checkpoints)
    assert gathered.wire_bytes == 48 * (num_forwards + 2) * 3 * 2048 * KV_BYTES


def test_time_of_the_link_is_exposed_or_hidden() -> None:
    """Bytes over the bandwidth, whatever the compute: a slow one hides them all, none is hidden by an endless rate."""
    slow, quick = of(flops=1e12), of(flops=1e30)
    assert slow.exposed + slow.hidden == pytest.approx(slow.wire_bytes / SPEED.bandwidth)
    assert slow.exposed < 0.05 * slow.hidden
    assert quick.hidden == pytest.approx(0, abs=1e-9)
    assert quick.exposed == pytest.approx(quick.wire_bytes / SPEED.bandwidth)


def test_what_is_held_is_in_proportion_to_the_sequence() -> None:
    assert 0 < of().held < 4 * 8192 * KV_BYTES
    assert of(seq_len=16384).held == pytest.approx(2 * of().held)
