"""What the planner varies, and what it holds fixed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ds_hybrid.dispatch.modes import Mode

AttentionKernel = Literal["fused", "eager"]

LOSS_CHUNK = 2048
"""Tokens whose logits exist at one time when the loss is taken in chunks."""


@dataclass(frozen=True)
class Workload:
    """One micro-batch of the ranks that share one: a tensor-parallel or sequence-parallel group.

    Attributes:
        value_bytes: of a weight, an activation and a value on the wire: 2 in bf16, 4 in float32.
        attention: an eager one keeps the scores of all pairs of tokens, a fused one does not.
    """

    seq_len: int
    micro_batch: int = 1
    value_bytes: int = 2
    attention: AttentionKernel = "fused"

    @property
    def num_tokens(self) -> int:
        return self.seq_len * self.micro_batch


@dataclass(frozen=True)
class Candidate:
    """One way to train a model on ``world_size`` ranks.

    Attributes:
        tp_size: tensor_parallel.autotp_size, which shards attention; 1 is without.
        ep_size: expert_parallel.autoep_size.
        zero_stage: 0 to 3.
        mode: the dispatcher of all layers.
        checkpoints: layers keep only their input and are computed again in backward.
        chunked_loss: logits exist for ``LOSS_CHUNK`` tokens at a time, and are computed again in backward.
        sp_size: sequence_parallel_size, ranks that share out each sequence and gather keys and values; 1 is without.
        micro_batches: gradient_accumulation_steps.
    """

    world_size: int
    tp_size: int
    ep_size: int
    zero_stage: int
    mode: Mode
    checkpoints: bool = False
    chunked_loss: bool = False
    sp_size: int = 1
    micro_batches: int = 1

    @property
    def dp_size(self) -> int:
        """Copies of what is dense."""
        return self.world_size // self.tp_size

    @property
    def edp_size(self) -> int:
        """Copies of each expert."""
        return self.world_size // self.ep_size

    @property
    def num_sharing(self) -> int:
        """Ranks that work on one micro-batch."""
        return self.tp_size * self.sp_size

    @property
    def num_dispatches(self) -> float:
        """Of a layer in a step; forward is half of one, and runs again where layers are computed again."""
        return self.micro_batches * (1.5 if self.checkpoints else 1.0)

    @property
    def sizes(self) -> str:
        shared = f"SP {self.sp_size}, " if self.sp_size > 1 else ""
        return f"TP {self.tp_size}, {shared}EP {self.ep_size}, ZeRO {self.zero_stage}"

    def part_of(self, work: Workload) -> Workload:
        """What of a micro-batch a rank has where sequences are shared out; attention by blocks keeps no scores then."""
        if self.sp_size == 1:
            return work
        return replace(work, seq_len=-(-work.seq_len // self.sp_size), attention="fused")

    def tokens_dispatched(self, num_tokens: int) -> float:
        """Of the tokens that a rank has, how many it dispatches: with TP all ranks of a group have the same."""
        return num_tokens if self.mode == "replicated" else num_tokens / self.tp_size
