"""What a checkpoint says of its MoE layers, and what is said where it does not hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.autoep_affine import make_autoep_placement_descriptor

from ds_hybrid.errors import CheckpointError
from ds_hybrid.hf.files import find_files
from ds_hybrid.hf.layers import SavedLayer, SavedRecord, saved_layers


def converted(slots: list[list[int]] | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"moe_layer_id": 0, "module_path": "a.mlp", "num_experts": 4, "num_local_experts": 2}
    if slots is not None:
        entry["expert_placement"] = make_autoep_placement_descriptor(4, slots)
    return {"ds_autoep_layers": [entry], "num_experts": [4, 2]}


def read(folder: Path, state: dict[str, Any], record: dict[str, Any] | None = None) -> tuple[SavedLayer, ...]:
    for slot in range(4):
        torch.save({}, folder / f"layer_0_expert_{slot}_mp_rank_00_model_states.pt")
    for slot in range(2):
        name = f"b.moe.deepspeed_moe.experts.deepspeed_experts.{slot}.weight"
        torch.save({name: torch.ones(1)}, folder / f"layer_1_expert_{slot}_mp_rank_00_model_states.pt")
    torch.save({}, folder / "mp_rank_00_model_states.pt")
    if record is not None:
        (folder / "ds_hybrid.json").write_text(json.dumps(record))
    return saved_layers(find_files(folder), state, SavedRecord.read(folder))


def test_layers_of_both_kinds(tmp_path: Path) -> None:
    layers = read(tmp_path, converted([[3, 1], [0, 2]]), {"placements": {"b.moe": [[1], [0]]}})
    assert layers == (
        SavedLayer("a.mlp", 0, True, (3, 1, 0, 2), 2),
        SavedLayer("b.moe", 1, False, (1, 0), 2),
    )
    assert layers[0].experts_of_rank == [(3, 1), (0, 2)]


def test_what_is_not_written_is_contiguous(tmp_path: Path) -> None:
    layers = read(tmp_path, converted(None))
    assert [layer.expert_of_slot for layer in layers] == [(0, 1, 2, 3), (0, 1)]


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ({"a.mlp": [[0, 1], [2, 3]]}, r"placements of a.mlp is \[\[0, 1\], \[2, 3\]\], DeepSpeed's files say \[\[3"),
        ({"c": [[0]]}, "placements names c; the checkpoint's MoE layers are a.mlp, b.moe"),
        ({"b.moe": [[0], [0]]}, "placements of b.moe: .* must name each expert 0 to 1 exactly once"),
        ({"b.moe": [[0, 1], [2]]}, "placements of b.moe: "),
        ({"b.moe": [[0, 1], [2, 3]]}, "placements of b.moe has 4 experts, the checkpoint 2"),
    ],
)
def test_records_that_do_not_hold(tmp_path: Path, placements: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, converted([[3, 1], [0, 2]]), {"placements": placements})


def test_a_record_that_is_no_json_and_a_missing_file(tmp_path: Path) -> None:
    read(tmp_path, converted(None))
    (tmp_path / "ds_hybrid.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        SavedRecord.read(tmp_path)
    (tmp_path / "layer_0_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"layer_0_expert_2_.*: missing, with 0 more of 4\. Copy the files"):
        saved_layers(find_files(tmp_path), converted(None), SavedRecord())


@pytest.mark.parametrize(
    ("strided", "groups"), [(False, ((0, 1), (2, 3), (4, 5), (6, 7))), (True, ((0, 4), (1, 5), (2, 6), (3, 7)))]
)
def test_groups_that_deepspeed_makes(strided: bool, groups: Any) -> None:
    state = {"dp_world_size": 4, "mp_world_size": 2, "ds_config": {"use_data_before_expert_parallelism": strided}}
    assert SavedRecord().groups("ep_size_2", state) == groups
    assert SavedRecord({"ep_size_2": [[0, 7]]}).groups("ep_size_2", state) == [[0, 7]]
