"""Whole batches become the shards of the ranks that share their sequences, with all that the loss needs.

Every rank of a sequence-parallel group reads the same batch, and takes its part of every row. The loss is the mean
over the real tokens of an optimizer step, whichever ranks and micro-batches they lie on: a rank divides the sum of its
losses by ``num_items_in_batch``, the mean number of real tokens of a rank and micro-batch, and DeepSpeed takes the mean
over ranks and micro-batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ds_hybrid.attention.shards import Shards
from ds_hybrid.engine.sequence_groups import SequenceGroups
from ds_hybrid.errors import ConfigError

IGNORED = -100
"""The label of a token that has no part in the loss, as in Hugging Face."""

_FILL = {"labels": IGNORED, "shift_labels": IGNORED}
"""What stands at the tokens that make a length divide; 0 for every other key."""


def shard_batch(batch: Mapping[str, Any], groups: SequenceGroups) -> dict[str, Any]:
    """This rank's part of a batch that every rank of its group has whole.

    Args:
        batch: ``input_ids`` [B, L] (or ``inputs_embeds`` [B, L, H]) and, where there is a loss, ``labels`` [B, L] as
            Hugging Face takes them. ``position_ids`` [B, L] or [1, L] restart where a packed document begins; without
            them they count from 0. ``attention_mask`` [B, L] is 0 at padding. Other tensors [B, L, ...] are sharded
            too; what has another shape is passed on.

    Returns:
        The same keys, tensors [B, Ls, ...] of Ls tokens, equal on all ranks: an early and a late chunk of every row,
        padded where L does not divide into 2n chunks. ``position_ids`` is always there, ``attention_mask`` (bool) where
        anything is padding, and ``labels`` have become ``shift_labels``: the label of the next token of the whole row.

    Raises:
        ConfigError: no tokens, a mask of another shape, or both kinds of labels.
    """
    whole = {key: value for key, value in batch.items() if value is not None}
    tokens = whole.get("input_ids", whole.get("inputs_embeds"))
    if tokens is None:
        raise ConfigError("a batch to shard: it has neither input_ids [B, L] nor inputs_embeds [B, L, H]. Give one.")
    rows, length = tokens.shape[:2]
    _check(whole, rows, length)
    shards = Shards(length, groups.size)
    if "labels" in whole:
        whole["shift_labels"] = pad(whole.pop("labels")[:, 1:], (0, 1), value=IGNORED)
    positions = whole.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=tokens.device)[None]
    whole["position_ids"] = positions.expand(rows, length)
    if shards.padded_length > length and "attention_mask" not in whole:
        whole["attention_mask"] = torch.ones(rows, length, dtype=torch.bool, device=tokens.device)
    if "attention_mask" in whole:
        # transformers makes one anew for each kind of layers unless it is bool already.
        whole["attention_mask"] = whole["attention_mask"].bool()
    return {
        key: _part(value, shards, groups.rank, fill=_FILL.get(key, 0)) if _is_by_token(value, rows, length) else value
        for key, value in whole.items()
    }


def _part(values: Tensor, shards: Shards, rank: int, *, fill: int) -> Tensor:
    """[B, L, ...] -> [B, Ls, ...]."""
    around = [0, 0] * (values.ndim - 2) + [0, shards.padded_length - shards.num_tokens]
    part: Tensor = shards.shard(pad(values, around, value=fill), rank)
    return part.contiguous()


def _check(batch: Mapping[str, Any], rows: int, length: int) -> None:
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None and mask.shape != (rows, length):
        raise ConfigError(
            f"attention_mask {list(mask.shape)} of a batch to shard: must be [{rows}, {length}], 0 at padding. A mask "
            "of pairs is not needed: position_ids that restart keep packed documents apart."
        )
    if positions is not None and (positions.ndim != 2 or positions.shape not in ((rows, length), (1, length))):
        raise ConfigError(
            f"position_ids {list(positions.shape)} of a batch to shard: must be [{rows}, {length}] or [1, {length}]."
        )
    if "labels" in batch and "shift_labels" in batch:
        raise ConfigError("a batch to shard: it has labels and shift_labels. Give labels alone.")


def _is_by_token(value: Any, rows: int, length: int) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == (rows, length)


class SequenceBatches:
    """A loader of whole batches, read as this rank's shards. Every rank iterates over it: fetching is collective.

    As many batches are fetched at a time as an optimizer step takes, for their tokens are counted together. Batches
    that the end of the loader leaves over start the first step of the next iteration.

    Args:
        loader: gives batches as :func:`shard_batch` takes them, the same on every rank of a sequence-parallel group
            (the loader that ``initialize`` makes of ``training_data`` does).
        groups: who shares sequences.
        per_step: batches of an optimizer step; 1 to count each batch alone, as an evaluation does.
        device: where the shards go.
    """

    def __init__(
        self, loader: Iterable[Mapping[str, Any]], groups: SequenceGroups, *, per_step: int, device: Any
    ) -> None:
        self._loader = loader
        self._groups = groups
        self._per_step = per_step
        self._device = device
        self._waiting: list[Mapping[str, Any]] = []

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields shards; those with labels have ``num_items_in_batch`` [], float32, too.

        Raises:
            ConfigError: on every rank, when the ranks of a group have read different batches, or ranks different
                numbers of them.
        """
        batches = iter(self._loader)
        while True:
            whole = next(batches, None)
            if whole is not None:
                self._waiting.append(whole)
            ended = whole is None
            if len(self._waiting) < self._per_step and not ended:
                continue
            self._compare(ended=ended)
            if ended:
                return
            waiting, self._waiting = self._waiting, []
            yield from self._with_counts([shard_batch(_on(self._device, batch), self._groups) for batch in waiting])

    def _compare(self, *, ended: bool) -> None:
        digest = zlib.crc32(b"".join(_bytes(batch) for batch in self._waiting))
        mine = torch.tensor([digest, int(ended)], device=self._device)
        of_rank = torch.empty(dist.get_world_size() * 2, dtype=mine.dtype, device=self._device)
        dist.all_gather_into_tensor(of_rank, mine, group=self._groups.whole_world)
        digests, ends = of_rank.view(-1, 2).T.tolist()
        if len(set(ends)) > 1:
            rank = ends.index(1)
            raise ConfigError(f"the batches of sequences: rank {rank} has no more, others do. Give all as many.")
        size = self._groups.size
        for first in range(0, len(digests), size):
            other = next((rank for rank in range(first, first + size) if digests[rank] != digests[first]), None)
            if other is not None:
                raise ConfigError(
                    f"the batches of sequences: ranks {first} and {other} share sequences and have read different "
                    "ones. Give the loader a sampler of engine.sequence_parallel.num_sequences replicas, and "
                    "engine.sequence_parallel.sequence as the replica."
                )

    def _with_counts(self, shards: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        labels = [shard["shift_labels"] for shard in shards if "shift_labels" in shard]
        if not labels:
            yield from shards
            return
        count = torch.stack([(part != IGNORED).sum() for part in labels]).sum()
        dist.all_reduce(count, group=self._groups.whole_world)
        per_part = count.clamp_min(1).float() / (dist.get_world_size() * self._per_step)
        for shard in shards:
            yield {**shard, "num_items_in_batch": per_part}


def _on(device: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def _bytes(batch: Mapping[str, Any]) -> bytes:
    """All tensors of a batch, with their names, kinds and shapes."""
    tensors = {key: value for key, value in sorted(batch.items()) if isinstance(value, Tensor)}
    return b"".join(
        f"{key} {value.dtype} {tuple(value.shape)}".encode() + _content(value) for key, value in tensors.items()
    )


def _content(values: Tensor) -> bytes:
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
