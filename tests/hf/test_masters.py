"""Flat parts of several ranks become whole tensors: files made by hand, numbers that tell where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hybrid.errors import CheckpointError
from ds_hybrid.hf.files import find_files
from ds_hybrid.hf.masters import masters_of_stage_3, masters_of_stages_1_and_2
from ds_hybrid.hf.unnamed_masters import masters_without_zero

GROUPS = {"ep_size_2": [[0, 3], [1, 2]]}


def write(folder: Path, name: str, **content: Any) -> None:
    torch.save(content, folder / name)


def test_stages_1_and_2_join_runs_in_the_order_of_ranks(tmp_path: Path) -> None:
    """Of [3, 3] and, after a pad, [2] over four ranks; an expert's [2, 2] over the two ranks of each place."""
    shapes = [{"a": (3, 3), "b": (2,)}, {"e": (2, 2)}]
    write(tmp_path, "mp_rank_00_model_states.pt", param_shapes=shapes)
    for rank in range(4):
        write(
            tmp_path,
            f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            optimizer_state_dict={
                "base_optimizer_state": {"param_groups": [{"name": "rest"}, {"name": "ep_size_2", "moe": True}]},
                "single_partition_of_fp32_groups": [10.0 * rank + torch.arange(4), 100.0 * rank + torch.arange(2)],
                "param_alignment_paddings": [[3, 0], [0]],
            },
        )
    masters = masters_of_stages_1_and_2(find_files(tmp_path), GROUPS.__getitem__)
    assert masters.get("a", (3, 3)).tolist() == [[0, 1, 2], [3, 10, 11], [12, 13, 20]]  # type: ignore[union-attr]
    assert masters.get("b", (2,)).tolist() == [30, 31]  # type: ignore[union-attr]
    assert masters.get("e", (2, 2), 0).tolist() == [[0, 1], [100, 101]]  # type: ignore[union-attr]
    assert masters.get("e", (2, 2), 1).tolist() == [[200, 201], [300, 301]]  # type: ignore[union-attr]
    assert masters.get("c", (1,)) is None
    assert masters.ep_sizes == {"e": 2}
    with pytest.raises(CheckpointError, match="a: its 3 parts have 9 values, must have 16"):
        masters.get("a", (4, 4))
    with pytest.raises(CheckpointError, match=r"expert_groups of ep_size_2 is \[\[0, 1\]\], without rank 2"):
        masters_of_stages_1_and_2(find_files(tmp_path), lambda name: [[0, 1]])


def test_stage_3_cuts_every_parameter(tmp_path: Path) -> None:
    """[5] over two ranks is 3 and 2 with a pad; experts stay whole on ranks that share them with no other."""
    for rank in range(2):
        layer = {"ep_rank": rank, "ep_size": 2}
        shapes = [{"a": (5,), "b": (2,)}, {"e": (2,)}]
        write(
            tmp_path,
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
            param_shapes=shapes,
            ds_autoep_layers=[layer],
        )
        write(
            tmp_path,
            f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            optimizer_state_dict={
                "partition_count": 2,
                "fp32_flat_groups": [10.0 * rank + torch.arange(4), 100.0 * rank + torch.arange(2)],
                "ds_zero_partition_groups": [
                    {"partition_count": 2, "families": ["replicated"]},
                    {"partition_count": 1, "families": ["autoep_expert"]},
                ],
            },
        )
    masters = masters_of_stage_3(find_files(tmp_path))
    assert masters.get("a", (5,)).tolist() == [0, 1, 2, 10, 11]  # type: ignore[union-attr]
    assert masters.get("b", (2,)).tolist() == [3, 13]  # type: ignore[union-attr]
    assert masters.get("e", (2,), 1).tolist() == [100, 101]  # type: ignore[union-attr]


@pytest.mark.parametrize("is_flat", [False, True])
def test_without_zero_a_master_is_known_by_its_value(tmp_path: Path, is_flat: bool) -> None:
    """Two weights that are equal in bf16, whose masters are not, are told apart by their order."""
    masters = [torch.randn(3, 2), torch.ones(4), torch.ones(4) + 1e-3, torch.randn(5)]
    assert torch.equal(masters[1].bfloat16(), masters[2].bfloat16())
    groups = {"fp32_groups_flat": [torch.cat([master.flatten() for master in masters])]}
    write(tmp_path, "mp_rank_00_model_states.pt")
    write(
        tmp_path,
        "expp_rank_0_mp_rank_00_optim_states.pt",
        optimizer=groups if is_flat else {"fp32_groups": [masters[:1], masters[1:]]},
    )
    weights = {(f"p{i}", 0): master.bfloat16() for i, master in enumerate(masters)}
    weights["frozen", 0] = torch.randn(2).bfloat16()
    found = masters_without_zero(find_files(tmp_path), lambda: weights)
    for i, master in enumerate(masters):
        values = found.get(f"p{i}", master.shape)
        assert values is not None
        assert torch.equal(values, master)
    assert found.get("frozen", (2,)) is None


def test_without_zero_in_fp32_the_weights_are_all(tmp_path: Path) -> None:
    write(tmp_path, "mp_rank_00_model_states.pt")
    write(tmp_path, "expp_rank_0_mp_rank_00_optim_states.pt", optimizer={"state": {}, "param_groups": []})
    assert masters_without_zero(find_files(tmp_path), lambda: pytest.fail("read for nothing")).parts == {}
