"""The bytes that leave a rank for one attention layer whose keys and values are gathered. Pure.

The formulas hold for every mask: what the mask makes useless travels too. Queries and outputs stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_hybrid.dispatch.modes import FP8_BLOCK, WireDtype

Variant = Literal["whole", "blocks", "ring"]


@dataclass(frozen=True)
class KVShape:
    """Keys and values of one rank.

    Attributes:
        num_ranks: that share a sequence.
        batch_size: sequences.
        shard_length: tokens of each sequence that a rank holds, padding included.
        num_kv_heads: as they are in the model: heads of queries that share keys and values cost nothing.
        head_dim, value_head_dim: values of a key, and of a value, in a head.
        value_bytes: bytes of one number on the device; gradients travel so.
        wire_dtype: how keys and values travel.
    """

    num_ranks: int
    batch_size: int
    shard_length: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    value_bytes: int
    wire_dtype: WireDtype = "auto"

    @property
    def token_wire_bytes(self) -> int:
        """Keys and values of one place of all sequences, on the wire."""
        return self.batch_size * (self.key_wire_bytes + self.value_wire_bytes)

    @property
    def key_wire_bytes(self) -> int:
        """All heads of one token's keys."""
        return self.num_kv_heads * head_wire_bytes(self.head_dim, self.value_bytes, self.wire_dtype)

    @property
    def value_wire_bytes(self) -> int:
        """All heads of one token's values."""
        return self.num_kv_heads * head_wire_bytes(self.value_head_dim, self.value_bytes, self.wire_dtype)

    @property
    def token_gradient_bytes(self) -> int:
        """Gradients of the keys and values of one place of all sequences."""
        return self.batch_size * self.num_kv_heads * (self.head_dim + self.value_head_dim) * self.value_bytes


def head_wire_bytes(head_dim: int, value_bytes: int, wire_dtype: WireDtype) -> int:
    """One head of one token. fp8 has one float32 scale for each 128 values of it."""
    if wire_dtype == "fp8_e4m3":
        return head_dim + 4 * -(-head_dim // FP8_BLOCK)
    return head_dim * (2 if wire_dtype == "bf16" else value_bytes)


def forward_bytes(shape: KVShape) -> int:
    """What a rank sends in a forward of any variant: its keys and values once for each other rank.

    A ring sends them once, and n-2 times those of others: as many.
    """
    return (shape.num_ranks - 1) * shape.shard_length * shape.token_wire_bytes


def backward_bytes(variant: Variant, shape: KVShape, *, num_kept_rows: int = 0) -> int:
    """What a rank sends in a backward: keys and values again where they were not kept, and gradients to their ranks.

    Args:
        num_kept_rows: rows of its shard that the other ranks kept; all of them for ``"whole"``, none for ``"ring"``.
    """
    kept = {"whole": shape.shard_length, "blocks": num_kept_rows, "ring": 0}[variant]
    again = (shape.shard_length - kept) * shape.token_wire_bytes
    return (shape.num_ranks - 1) * (again + shape.shard_length * shape.token_gradient_bytes)


def ulysses_bytes(shape: KVShape, num_heads: int) -> int:
    """What a rank sends in a forward, and again in a backward, of DeepSpeed's Ulysses: queries, keys, values and output
    go from shards of the sequence to shards of the heads, or back. Needs heads, of keys too, that the ranks divide.
    """
    queries = num_heads * (shape.head_dim + shape.value_head_dim) * shape.value_bytes * shape.batch_size
    whole = shape.shard_length * (queries + shape.token_gradient_bytes)
    return whole * (shape.num_ranks - 1) // shape.num_ranks


def gathered_bytes(shape: KVShape) -> int:
    """Keys and values of all ranks as they lie in memory once they have arrived."""
    return shape.num_ranks * shape.shard_length * shape.token_wire_bytes
