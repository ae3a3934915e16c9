"""The formulas against what they are made of; counted bytes are in tests/multirank/test_kv_gather.py."""

from __future__ import annotations

from dataclasses import replace

from ds_hybrid.attention.traffic import KVShape, backward_bytes, forward_bytes, gathered_bytes, ulysses_bytes

MHA = KVShape(4, 1, 128, 8, 64, 64, 4)
S = 128 * 8 * 64 * 4


def test_in_units_of_a_shard_of_queries() -> None:
    """Four ranks, as many heads of keys as of queries: 6 S, and 12 S in backward, 6 where keys and values were kept."""
    assert forward_bytes(MHA) == 6 * S
    assert backward_bytes("ring", MHA) == backward_bytes("blocks", MHA) == 12 * S
    assert backward_bytes("whole", MHA) == backward_bytes("blocks", MHA, num_kept_rows=128) == 6 * S
    assert ulysses_bytes(MHA, num_heads=8) == 3 * S
    assert gathered_bytes(MHA) == 8 * S


def test_shared_heads_make_gathering_cheaper_than_ulysses() -> None:
    """8:1 on 8 ranks: 1.75 S against 1.97 S."""
    shared = KVShape(8, 1, 128, 1, 64, 64, 4)
    assert forward_bytes(shared) == 1.75 * S
    assert ulysses_bytes(shared, num_heads=8) == 2.25 * 7 / 8 * S


def test_fp8_and_bf16_on_the_wire() -> None:
    """A scale of 4 bytes for each head of up to 128 values. Gradients are not rounded."""
    fp8, bf16 = replace(MHA, wire_dtype="fp8_e4m3"), replace(MHA, wire_dtype="bf16")
    assert forward_bytes(bf16) == 3 * S
    assert forward_bytes(fp8) * 4 == forward_bytes(MHA) * (64 + 4) / 64
    assert backward_bytes("ring", fp8) == forward_bytes(fp8) + 6 * S


def test_one_rank_sends_nothing() -> None:
    alone = replace(MHA, num_ranks=1)
    assert forward_bytes(alone) == backward_bytes("ring", alone) == ulysses_bytes(alone, 8) == 0
