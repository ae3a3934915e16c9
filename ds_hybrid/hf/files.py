"""The files of a checkpoint folder, by what their names say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ds_hybrid.engine.staging import read_latest
from ds_hybrid.errors import CheckpointError

_MODEL = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<tp>\d+)_model_states\.pt")
_SHARD = re.compile(r"((bf16|fp16)_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<tp>\d+)_optim_states\.pt")
_EXPERT = re.compile(r"layer_(?P<layer>\d+)_expert_(?P<slot>\d+)_mp_rank_(?P<tp>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"expp_rank_(?P<rank>\d+)_mp_rank_(?P<tp>\d+)_optim_states\.pt")


RankKey = tuple[int, int]
"""A rank: its place in the data-parallel group, and in the tensor-parallel one."""


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of one tag.

    Attributes:
        folder: where they are.
        model_states: of every rank with ZeRO stage 3, else of the first data-parallel rank.
        shards: ZeRO's parts of the optimizer, of every rank; none without ZeRO.
        experts: by (layer, slot); none with ZeRO stage 3.
        optimizers: without ZeRO, by place in the expert-parallel group.
    """

    folder: Path
    model_states: Mapping[RankKey, Path]
    shards: Mapping[RankKey, Path]
    experts: Mapping[tuple[int, int], Path]
    optimizers: Mapping[int, Path]

    @property
    def weights_are_partitioned(self) -> bool:
        """Whether this is of ZeRO stage 3: the model's weights are in the shards alone."""
        return self.model_states[0, 0].name.startswith("zero_")

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return 1 + max(tp for _, tp in self.model_states)

    def check_ranks(self, num_data_parallel: int, num_tensor_parallel: int) -> None:
        """All ranks of the run have left their files, and no others.

        Raises:
            CheckpointError: the first rank of which that is not so.
        """
        ranks = set(product(range(num_data_parallel), range(num_tensor_parallel)))
        states = ranks if self.weights_are_partitioned else {(0, tp) for _, tp in ranks}
        for files, expected in ((self.model_states, states), (self.shards, ranks if self.shards else set())):
            for place, tp in sorted(expected ^ files.keys()):
                kind = "model" if files is self.model_states else "optim"
                is_there, fix = ("is there", "Remove it") if (place, tp) in files else ("is missing", "Copy it here")
                raise CheckpointError(
                    f"{self.folder}: the *_{kind}_states.pt of rank (data {place}, tensor {tp}) {is_there}; the run "
                    f"had {num_data_parallel} x {num_tensor_parallel} ranks. {fix}, or save again to a folder that all "
                    "hosts share."
                )


def find_files(checkpoint: str | Path, tag: str | None = None) -> CheckpointFiles:
    """The files of a tag.

    Args:
        checkpoint: the folder that ``save_checkpoint`` was given, or that of a tag in it.
        tag: None for the one that the file ``latest`` names.

    Raises:
        CheckpointError: there is no such folder or tag, or what is there is not a checkpoint that can be read.
    """
    folder = _folder_of(Path(checkpoint), tag)
    found: dict[re.Pattern[str], dict[Any, Path]] = {_MODEL: {}, _SHARD: {}, _EXPERT: {}, _OPTIMIZER: {}}
    for path in sorted(folder.iterdir()):
        for pattern, files in found.items():
            match = pattern.fullmatch(path.name)
            if match is None:
                continue
            key = _key(pattern, match)
            if key in files:
                raise CheckpointError(
                    f"{folder}: holds both {files[key].name} and {path.name}, of two runs. Remove the older files."
                )
            files[key] = path
    if (folder / "zero").is_dir():
        raise CheckpointError(f"{folder}: a universal checkpoint. Name the one that it was made from.")
    if (0, 0) not in found[_MODEL]:
        raise CheckpointError(
            f"{folder}: holds no *mp_rank_00_model_states.pt, so it is not a checkpoint. Name the folder that "
            "save_checkpoint was given."
        )
    return CheckpointFiles(folder, *found.values())


def _key(pattern: re.Pattern[str], match: re.Match[str]) -> int | tuple[int, int]:
    if pattern is _EXPERT:
        return int(match["layer"]), int(match["slot"])
    rank = int(match["rank"] or 0)
    return rank if pattern is _OPTIMIZER else (rank, int(match["tp"]))


def _folder_of(checkpoint: Path, tag: str | None) -> Path:
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: no such folder. Name the folder that save_checkpoint was given.")
    tag = read_latest(checkpoint) if tag is None else tag
    folder = checkpoint / tag if tag else checkpoint
    tags = sorted(path.name for path in checkpoint.iterdir() if any(path.glob("*_model_states.pt")))
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such tag. Tags in {checkpoint}: {', '.join(tags) or 'none'}.")
    if folder == checkpoint and tags:
        raise CheckpointError(f'{checkpoint}: has no file "latest". Give a tag: {", ".join(tags)}.')
    return folder
