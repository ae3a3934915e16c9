"""Whole batches become shards: every token on one rank, what the loss and attention need beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hybrid.attention.shards import Shards
from ds_hybrid.engine.sequence_batches import shard_batch
from ds_hybrid.engine.sequence_groups import SequenceGroups
from ds_hybrid.errors import ConfigError


def parts(batch: dict[str, Any], size: int) -> list[dict[str, Any]]:
    return [shard_batch(batch, SequenceGroups(size, rank, None, None, None)) for rank in range(size)]


def joined(shards: list[dict[str, Any]], key: str, length: int) -> Tensor:
    """The sequence with its padding."""
    whole: Tensor = Shards(length, len(shards)).unshard(torch.cat([shard[key] for shard in shards], 1))
    return whole


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 5, 16, 17])
def test_shards_make_the_batch_again(size: int, length: int) -> None:
    ids = torch.arange(1, 2 * length + 1).view(2, length)
    shards = parts({"input_ids": ids, "labels": ids}, size)
    padded = Shards(length, size).padded_length
    filled = padded - length
    assert joined(shards, "input_ids", length).tolist() == torch.nn.functional.pad(ids, (0, filled)).tolist()
    labels = torch.nn.functional.pad(ids[:, 1:], (0, filled + 1), value=-100)
    assert joined(shards, "shift_labels", length).tolist() == labels.tolist()
    assert joined(shards, "position_ids", length)[:, :length].tolist() == [list(range(length))] * 2
    assert all("labels" not in shard for shard in shards)
    if filled:
        assert joined(shards, "attention_mask", length).tolist() == [[1] * length + [0] * filled] * 2
    else:
        assert all("attention_mask" not in shard for shard in shards)


def test_each_rank_has_an_early_and_a_late_chunk() -> None:
    first, second = parts({"input_ids": torch.arange(8)[None]}, 2)
    assert first["input_ids"].tolist() == [[0, 1, 6, 7]]
    assert second["input_ids"].tolist() == [[2, 3, 4, 5]]


def test_given_positions_and_padding_are_kept() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    shards = parts({"input_ids": torch.ones(2, 5), "position_ids": positions, "attention_mask": mask}, 2)
    assert joined(shards, "position_ids", 5)[:, :5].tolist() == positions.expand(2, 5).tolist()
    assert joined(shards, "attention_mask", 5).tolist() == torch.nn.functional.pad(mask, (0, 3)).tolist()


def test_tensors_by_token_are_sharded_and_others_passed_on() -> None:
    embeddings, weights = torch.arange(24.0).view(1, 8, 3), torch.ones(1, 8)
    batch = {"inputs_embeds": embeddings, "weights": weights, "name": "a", "scale": torch.ones(5), "nothing": None}
    first, _ = parts(batch, 2)
    assert first["inputs_embeds"].tolist() == embeddings[:, [0, 1, 6, 7]].tolist()
    assert first["weights"].shape == (1, 4)
    assert first["name"] == "a"
    assert first["scale"] is batch["scale"]
    assert "nothing" not in first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"input_ids": None},
            "a batch to shard: it has neither input_ids [B, L] nor inputs_embeds [B, L, H]. Give one.",
        ),
        (
            {"attention_mask": torch.ones(2, 1, 4, 4)},
            "attention_mask [2, 1, 4, 4] of a batch to shard: must be [2, 4], 0 at padding. A mask of pairs is not "
            "needed: position_ids that restart keep packed documents apart.",
        ),
        (
            {"position_ids": torch.ones(3, 2, 4)},
            "position_ids [3, 2, 4] of a batch to shard: must be [2, 4] or [1, 4].",
        ),
        (
            {"shift_labels": torch.ones(2, 4)},
            "a batch to shard: it has labels and shift_labels. Give labels alone.",
        ),
    ],
)
def test_wrong_batches(changes: dict[str, Any], message: str) -> None:
    batch = {"input_ids": torch.ones(2, 4), "labels": torch.ones(2, 4), **changes}
    with pytest.raises(ConfigError) as error:
        parts(batch, 2)
    assert str(error.value) == message
