"""The dispatchers, and what a value may be on the wire, by name."""

from typing import Literal, get_args

Mode = Literal["alltoall", "allgather", "two_stage", "hierarchical", "replicated"]

Sender = Literal[Mode, "kv_gather"]
"""Whose bytes a meter counts: a dispatcher's, or those of attention over sequences that ranks share."""

ALL_MODES: tuple[Mode, ...] = get_args(Mode)

MODES: tuple[Mode, ...] = ("alltoall", "allgather", "two_stage")
"""Those that need only an expert-parallel group: ``hierarchical`` needs its nodes, ``replicated`` the same tokens."""

WireDtype = Literal["auto", "bf16", "fp8_e4m3"]

NUM_FACTS = 7
"""Integers that each rank sends for the guard."""

FP8_BLOCK = 128
"""Values of a row that share one float32 scale in fp8."""
