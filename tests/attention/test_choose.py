from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hybrid.attention.choose import AttentionShape, Schedule, choose, forecast, held_bytes
from ds_hybrid.attention.traffic import KVShape, gathered_bytes
from ds_hybrid.dispatch.predict import GroupSpeed

KV = KVShape(4, 1, 4096, 8, 128, 128, 2)
LAYER = AttentionShape(KV, num_heads=32, causal=True)
FLOPS = 2e14


def link(rho: float, latency: float = 0.0) -> GroupSpeed:
    """Gathers all keys in ``rho`` times the scores."""
    scores = LAYER.seconds(KV.head_dim, FLOPS)
    return GroupSpeed(latency, 3 * KV.shard_length * KV.key_wire_bytes / (rho * scores))


def test_the_ring_where_everything_hides_and_pieces_where_the_link_is_short() -> None:
    """On many ranks both hide all of a fast link, and the ring holds less; at rho = 1 pieces come sooner."""
    many = replace(LAYER, kv=replace(KV, num_ranks=32))
    ring, reason = choose("auto", many, speed=link(0.01), matmul_flops=FLOPS)
    assert ring.variant == "ring"
    assert "0 ms exposed" in reason
    assert "others: blocks in 2 pieces" in reason
    blocks, reason = choose("auto", LAYER, speed=link(1.0), matmul_flops=FLOPS)
    assert (blocks.variant, blocks.keep_bytes) == ("blocks", 0)
    assert blocks.num_pieces >= 8
    assert reason.startswith(f"blocks in {blocks.num_pieces} pieces: ")


def test_few_pieces_where_every_message_is_slow() -> None:
    quick, _ = choose("blocks", LAYER, speed=link(1.0), matmul_flops=FLOPS)
    scores = LAYER.seconds(KV.head_dim, FLOPS)
    slow, _ = choose("blocks", LAYER, speed=link(1.0, latency=scores / 4), matmul_flops=FLOPS)
    assert slow.num_pieces < quick.num_pieces


def test_it_takes_the_quickest_of_its_candidates() -> None:
    for rho in (0.1, 0.5, 1.0, 4.0):
        best, _ = choose("auto", LAYER, speed=link(rho), matmul_flops=FLOPS)
        times = {
            schedule: sum(t.total for t in forecast(schedule, LAYER, link(rho), FLOPS))
            for schedule in (best, Schedule("ring"), Schedule("blocks"), Schedule("blocks", num_pieces=2))
        }
        assert times[best] <= 1.02 * min(times.values())


def test_memory_decides_what_is_taken_and_what_is_kept() -> None:
    everything = gathered_bytes(KV)
    plenty, reason = choose("auto", LAYER, speed=link(1.0), matmul_flops=FLOPS, memory_bytes=4 * everything)
    assert plenty.num_kept(everything) == plenty.num_pieces
    assert f"{plenty.num_pieces} pieces kept" in reason
    tight, reason = choose("blocks", LAYER, speed=link(1.0), matmul_flops=FLOPS, memory_bytes=everything)
    assert 0 < tight.num_kept(everything) < tight.num_pieces
    assert held_bytes(tight, LAYER) <= everything
    assert reason.endswith("within 67.1 MB")
    none, reason = choose("auto", LAYER, speed=link(1.0), matmul_flops=FLOPS, memory_bytes=1000)
    assert held_bytes(none, LAYER) == min(held_bytes(s, LAYER) for s in (none, Schedule("ring"), Schedule("blocks")))
    assert "nothing stays within 0.001 MB" in reason


def test_what_was_asked_for_is_taken() -> None:
    assert choose("whole", LAYER, speed=link(1.0), matmul_flops=FLOPS)[0].variant == "whole"
    ring, reason = choose("ring", LAYER, speed=link(4.0), matmul_flops=FLOPS)
    assert ring.variant == "ring"
    assert reason.endswith("(asked for)")


def test_one_rank_exchanges_nothing() -> None:
    alone = replace(LAYER, kv=replace(KV, num_ranks=1))
    assert "nothing is exchanged" in choose("auto", alone, speed=link(1.0), matmul_flops=FLOPS)[1]


@pytest.mark.parametrize(("causal", "window", "keys"), [(True, None, 8192), (False, None, 16384), (True, 1000, 1000)])
def test_pairs_of_a_rank(causal: bool, window: int | None, keys: int) -> None:
    assert AttentionShape(KV, 32, causal, window).num_pairs == 4096 * keys
