"""Which files of a folder are a checkpoint's, and what is said of folders that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_hybrid.errors import CheckpointError
from ds_hybrid.hf.files import find_files

STAGE_1 = ["mp_rank_00_model_states.pt", *(f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(2))]
STAGE_3 = [f"zero_pp_rank_{r}_mp_rank_00_{k}_states.pt" for r in range(2) for k in ("model", "optim")]


def make(folder: Path, names: list[str], *, latest: str | None = "step2") -> Path:
    tag = folder / "step2"
    tag.mkdir(parents=True)
    for name in names:
        (tag / name).touch()
    if latest is not None:
        (folder / "latest").write_text(f"{latest}\n")
    return folder


def test_files_by_rank_layer_and_slot(tmp_path: Path) -> None:
    experts = [f"layer_1_expert_{slot}_mp_rank_0{slot}_model_states.pt" for slot in range(2)]
    folder = make(tmp_path, [*STAGE_1, *experts, "ds_hybrid.json", "expp_rank_1_mp_rank_00_optim_states.pt"])
    files = find_files(folder)
    assert files == find_files(folder, "step2") == find_files(folder / "step2")
    assert files.model_states == {(0, 0): folder / "step2" / STAGE_1[0]}
    assert files.shards.keys() == {(0, 0), (1, 0)}
    assert files.experts == {(1, slot): folder / "step2" / experts[slot] for slot in range(2)}
    assert files.optimizers.keys() == {1}
    assert not files.weights_are_partitioned
    files.check_ranks(2, 1)


def test_stage_3_is_told_by_its_names(tmp_path: Path) -> None:
    files = find_files(make(tmp_path, STAGE_3))
    assert files.weights_are_partitioned
    files.check_ranks(2, 1)


@pytest.mark.parametrize(
    ("names", "ranks", "message"),
    [
        (STAGE_1[:2], (2, 1), r"the \*_optim_states.pt of rank \(data 1, tensor 0\) is missing; the run had 2 x 1"),
        (STAGE_1, (1, 1), r"the \*_optim_states.pt of rank \(data 1, tensor 0\) is there; the run had 1 x 1 .* Remove"),
        (STAGE_1, (2, 2), r"the \*_model_states.pt of rank \(data 0, tensor 1\) is missing"),
        (STAGE_3[:2], (2, 1), r"the \*_model_states.pt of rank \(data 1, tensor 0\) is missing"),
    ],
)
def test_ranks_that_are_missing_or_too_many(
    tmp_path: Path, names: list[str], ranks: tuple[int, int], message: str
) -> None:
    files = find_files(make(tmp_path, names))
    with pytest.raises(CheckpointError, match=message):
        files.check_ranks(*ranks)


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    good, no_latest = make(tmp_path / "good", STAGE_1), make(tmp_path / "no_latest", STAGE_1, latest=None)
    empty, both = make(tmp_path / "empty", []), make(tmp_path / "both", [*STAGE_1, STAGE_1[1].removeprefix("bf16_")])
    universal = make(tmp_path / "universal", STAGE_1[:1])
    (universal / "step2" / "zero").mkdir()
    for path, tag, message in [
        (tmp_path / "nowhere", None, f"{tmp_path}/nowhere: no such folder. Name the folder that save_checkpoint"),
        (good, "step3", f"{good}/step3: no such tag. Tags in {good}: step2."),
        (no_latest, None, f'{no_latest}: has no file "latest". Give a tag: step2.'),
        (empty, None, f"{empty}/step2: holds no \\*mp_rank_00_model_states.pt, so it is not a checkpoint."),
        (both, None, "holds both bf16_zero_pp_rank_0.* and zero_pp_rank_0.*, of two runs. Remove the older files."),
        (universal, None, f"{universal}/step2: a universal checkpoint. Name the one that it was made from."),
    ]:
        with pytest.raises(CheckpointError, match=message):
            find_files(path, tag)
