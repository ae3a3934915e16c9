"""What a checkpoint of DeepSpeed's lacks: which ranks held which experts, and each layer's dispatcher.

It stands beside DeepSpeed's files as ``ds_hybrid.json``. DeepSpeed's own checkpoints have none, and load as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_hybrid.errors import CheckpointError

_NAME = "ds_hybrid.json"


@dataclass(frozen=True)
class Record:
    """What is written down.

    Attributes:
        expert_groups: by DeepSpeed's name of their size, such as "ep_size_4", all expert-parallel groups of the run.
        dispatch: the state of :class:`ds_hybrid.engine.auto_dispatch.AutoDispatch`.
    """

    expert_groups: Mapping[str, Sequence[Sequence[int]]]
    dispatch: Mapping[str, Any]


def write_record(save_dir: str | Path, tag: str, record: Record) -> None:
    """On rank 0, into the folder of the checkpoint; before DeepSpeed says that the checkpoint is the latest."""
    if dist.get_rank() == 0:
        folder = Path(save_dir, tag)
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{_NAME}.new"
        new.write_text(json.dumps(asdict(record), indent=1) + "\n")
        new.replace(folder / _NAME)
    dist.barrier()


def read_record(load_dir: str | Path, tag: str | None) -> Record | None:
    """What rank 0 finds, on every rank; None where there is none.

    Args:
        tag: None for the one that the file ``latest`` names.
    """
    found: list[Record | None] = [None]
    if dist.get_rank() == 0:
        latest = Path(load_dir, "latest")
        if tag is None and latest.is_file():
            tag = latest.read_text().strip()
        path = Path(load_dir, tag, _NAME) if tag else None
        if path is not None and path.is_file():
            found = [Record(**json.loads(path.read_text()))]
    dist.broadcast_object_list(found)
    return found[0]


def check_groups(record: Record, present: Mapping[str, Sequence[Sequence[int]]], *, load_dir: str | Path) -> None:
    """The optimizer's shards of experts fit only the ranks that held them.

    Raises:
        CheckpointError: the same ranks form other groups of one size now.
    """
    for name, groups in present.items():
        saved = record.expert_groups.get(name)
        if saved is None or sum(map(len, saved)) != sum(map(len, groups)):
            continue  # groups of another size, or another world: DeepSpeed's rules hold
        if [list(group) for group in saved] != [list(group) for group in groups]:
            raise CheckpointError(
                f"{load_dir}: saved with the expert groups {saved}, this run has {groups}. Set "
                f"ds_hybrid.topology.expert_groups to {saved}."
            )
