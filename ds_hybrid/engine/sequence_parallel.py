"""Sequences that several ranks share: switched on by a ds_config, and what a training loop needs of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ds_hybrid.attention.hugging_face import (
    SharedAttention,
    hugging_face_models,
    refuse_model,
    switch_attention,
)
from ds_hybrid.attention.kv_gather import KVGatherAttention
from ds_hybrid.attention.scheduler import Scheduler
from ds_hybrid.config import AttentionConfig, HybridConfig, gathers_kv
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.engine.agreement import raise_alike
from ds_hybrid.engine.groups import forget_mpu
from ds_hybrid.engine.sequence_batches import SequenceBatches, shard_batch
from ds_hybrid.engine.sequence_groups import SequenceGroups, make_sequence_groups
from ds_hybrid.engine.sequence_loss import balance_loss, token_loss
from ds_hybrid.errors import ConfigError


class SequenceParallel:
    """The sequences of an engine, ``engine.sequence_parallel``.

    ::

        sequences = engine.sequence_parallel
        for batch in sequences.batches(loader):          # the same batches on all ranks of a sequence
            outputs = engine(**batch, use_cache=False)
            loss = sequences.loss(outputs, batch)
            engine.backward(loss)
            engine.step()
            mean = sequences.mean(loss)                  # for people

    Args:
        groups: who shares sequences.
        attention: exchanges keys and values.
        shared: what the model's layers call.
    """

    def __init__(self, groups: SequenceGroups, attention: KVGatherAttention, shared: SharedAttention) -> None:
        self.groups = groups
        self.attention = attention
        self.shared = shared
        self._engine: Any = None

    def of_engine(self, engine: Any) -> None:
        """Learn what a step of the engine is."""
        self._engine = engine

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.groups.size

    @property
    def num_sequences(self) -> int:
        """Groups of ranks with sequences of their own: the replicas that a sampler deals batches out to."""
        return self.groups.num_sequences

    @property
    def sequence(self) -> int:
        """Which of them this rank is in, 0 to ``num_sequences`` - 1."""
        return self.groups.get_data_parallel_rank()

    def batches(self, loader: Iterable[Mapping[str, Any]], *, per_step: int | None = None) -> SequenceBatches:
        """This rank's shards of the loader's batches; see :class:`SequenceBatches`.

        Args:
            per_step: batches whose tokens make one mean: by default the micro-batches of an optimizer step. An
                evaluation gives 1.
        """
        if per_step is None:
            per_step = self._engine.gradient_accumulation_steps()
        return SequenceBatches(loader, self.groups, per_step=per_step, device=self._engine.device)

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of one batch; see :func:`shard_batch`. Without ``num_items_in_batch``.

        It does not look whether the ranks of a sequence have the same batch, as :meth:`batches` does.
        """
        return shard_batch(batch, self.groups)

    def loss(self, outputs: Any, batch: Mapping[str, Any]) -> Tensor:
        """What to give to ``engine.backward``: [] float32. Collective over the ranks of a sequence.

        Cross entropy of the shard's tokens, and the model's balance loss over whole sequences where the outputs hold
        router logits (``output_router_logits``).
        """
        return token_loss(outputs.logits, batch) + self.balance_loss(outputs, batch)

    def balance_loss(self, outputs: Any, batch: Mapping[str, Any]) -> Tensor | float:
        """That part of :meth:`loss`, times the model's coefficient; 0 without one or without router logits."""
        router_logits = getattr(outputs, "router_logits", None)
        if not router_logits:
            return 0.0
        config = hugging_face_models(self._engine.module)[0].config.get_text_config()
        coefficient = getattr(config, "router_aux_loss_coef", 0)
        if not coefficient:
            return 0.0
        top_k = getattr(config, "num_experts_per_tok", None)
        if top_k is None:
            raise ConfigError(
                f"{type(config).__name__} has router_aux_loss_coef = {coefficient} and no num_experts_per_tok: the "
                "balance loss is unknown. Set output_router_logits to false."
            )
        return coefficient * balance_loss(router_logits, batch.get("attention_mask"), self.groups, top_k=top_k)

    def mean(self, loss: Tensor) -> Tensor:
        """The mean over all ranks of what :meth:`loss` gave to each: the loss of all sequences; [] float32. Collective.

        Of a step of several micro-batches, it is the mean of what this gives for each.
        """
        total = loss.detach().float().clone()
        dist.all_reduce(total, group=self.groups.whole_world)
        return total / dist.get_world_size()


def share_sequences(
    model: nn.Module, document: Mapping[str, Any], config: HybridConfig, mpu: Any, mesh_param: Any
) -> SequenceParallel | None:
    """Make the groups and switch the model's attention, when the ds_config says so; else None. Collective.

    Raises:
        ConfigError: on every rank, when an mpu or a mesh is there, or the model's attention cannot be switched.
    """
    forget_mpu(SequenceGroups)
    if not gathers_kv(document):
        return None
    problems: tuple[str, ...] = ()
    try:
        _refuse_other_makers(mpu, mesh_param)
        refuse_model(model)
    except ConfigError as error:
        problems = error.problems
    raise_alike(problems)
    groups = make_sequence_groups(document["sequence_parallel_size"])
    attention = _attention_of(groups, config.attention)
    shared = switch_attention(model, attention, name=f"ds_hybrid_kv_gather_{groups.group.group_name}")
    return SequenceParallel(groups, attention, shared)


def _attention_of(groups: SequenceGroups, config: AttentionConfig) -> KVGatherAttention:
    assert config.kv_gather != "off"
    ranks = RankGroup(groups.group, Meter("kv_gather"))
    scheduler = Scheduler(ranks, config.kv_gather, memory_bytes=config.memory_bytes)
    return KVGatherAttention(ranks, scheduler, wire_dtype=config.wire_dtype)


def _refuse_other_makers(mpu: Any, mesh_param: Any) -> None:
    given = "mpu" if mpu is not None else "mesh_param" if mesh_param else None
    if given is not None:
        raise ConfigError(
            f"ds_hybrid.initialize({given}=...): with ds_hybrid.attention.kv_gather, the groups of ranks come from "
            'sequence_parallel_size. Leave it out, or set kv_gather to "off".'
        )
