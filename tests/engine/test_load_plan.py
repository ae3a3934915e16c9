"""How a checkpoint is loaded, from what it says of itself and what the run is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_hybrid.engine.checkpoint import Record, SavedCheckpoint, described_slots
from ds_hybrid.engine.load_plan import LoadPlan, plan_load
from ds_hybrid.errors import CheckpointError
from ds_hybrid.placement import ExpertPlacement

MOVED = [[3, 0], [1, 2]]
PAIRS, ALL = [[0, 1], [2, 3]], [[0, 1, 2, 3]]


def saved(slots: Any = MOVED, *, world_size: int = 4, groups: Any = PAIRS, **changes: Any) -> SavedCheckpoint:
    whole = SavedCheckpoint(
        folder="runs/step5",
        record=Record({f"ep_size_{len(slots)}": groups}, {}, {"mlp": slots}),
        carried={"mlp": slots},
        described={"mlp": slots},
        world_size=world_size,
        optimizer_names=["mlp.w1"],
    )
    return replace(whole, **changes)


def plan(checkpoint: SavedCheckpoint, *, ep_size: int = 2, groups: Any = PAIRS, **changes: Any) -> LoadPlan:
    options: dict[str, Any] = {
        "world_size": 4,
        "zero_stage": 1,
        "universal": False,
        "with_optimizer": True,
        "optimizer_is_torchs": False,
    }
    layers = {"mlp": ExpertPlacement.contiguous(4, ep_size)}
    return plan_load(checkpoint, layers, {f"ep_size_{ep_size}": groups}, **{**options, **changes})


def slots_of(loaded: LoadPlan) -> list[list[int]]:
    slots: list[list[int]] = loaded.placements["mlp"].expert_of_slot.tolist()
    return slots


def test_at_the_same_sizes_experts_are_where_they_were() -> None:
    assert slots_of(plan(saved())) == MOVED
    assert not plan(saved()).parts_optimizer_anew


def test_deepspeeds_checkpoint_has_them_in_order() -> None:
    straight = [[0, 1], [2, 3]]
    assert slots_of(plan(saved(straight, record=None, carried=None))) == straight
    assert slots_of(plan(saved(record=None, carried=None, described={}))) == straight


@pytest.mark.parametrize(("ep_size", "expected"), [(1, [[3, 0, 1, 2]]), (4, [[3], [0], [1], [2]])])
def test_weights_alone_go_to_who_has_their_slot_now(ep_size: int, expected: list[list[int]]) -> None:
    """DeepSpeed reads the file of each of its slots, whatever the number of ranks was."""
    assert slots_of(plan(saved(), ep_size=ep_size, with_optimizer=False)) == expected


def test_without_zero_the_optimizer_is_parted_anew() -> None:
    loaded = plan(saved(), ep_size=4, groups=ALL, zero_stage=0, optimizer_is_torchs=True)
    assert loaded.parts_optimizer_anew
    assert loaded.saved_placements["mlp"].expert_of_slot.tolist() == MOVED
    assert slots_of(loaded) == [[3], [0], [1], [2]]
    assert not plan(saved(world_size=8), zero_stage=0, optimizer_is_torchs=True).parts_optimizer_anew


def test_a_universal_one_is_in_order() -> None:
    universal = saved(ALL, carried={"mlp": MOVED}, is_universal=True)
    assert slots_of(plan(universal, ep_size=4, universal=True)) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("checkpoint", "options", "message"),
    [
        (
            saved(),
            {"ep_size": 4},
            'runs/step5: saved with ep_size 2 on 4 ranks, this run has ep_size 4 on 4. Run "ds_hybrid universal runs '
            '--tag step5" and load with checkpoint.load_universal = true in the ds_config.',
        ),
        (saved(world_size=8), {}, "saved with ep_size 2 on 8 ranks, this run has ep_size 2 on 4."),
        (saved(), {"ep_size": 4, "zero_stage": 3, "with_optimizer": False}, "saved with ep_size 2 on 4 ranks"),
        (
            saved(),
            {"ep_size": 4, "zero_stage": 0},
            "runs/step5: saved with other expert-parallel groups. Without ZeRO, masters of a low precision are not "
            "parted anew. Load it with load_optimizer_states=False, or let it be saved with ZeRO 1.",
        ),
        (
            saved(),
            {"groups": [[0, 3], [1, 2]]},
            "runs/step5: saved with the expert groups [[0, 1], [2, 3]], this run has [[0, 3], [1, 2]]. Set "
            "ds_hybrid.topology.expert_groups to [[0, 1], [2, 3]].",
        ),
        (saved(record=None), {}, "runs/step5/ds_hybrid.json: missing."),
        (saved(record=None, carried=None), {}, "runs/step5/ds_hybrid.json: missing."),
        (saved(carried=None), {}, "placements: mlp: [[3, 0], [1, 2]], the other files have None."),
        (saved(carried={"mlp": PAIRS}), {}, "the other files have [[0, 1], [2, 3]]. The record belongs to another"),
        (saved(described={"mlp": PAIRS}), {}, "the other files have [[0, 1], [2, 3]]. The record belongs to another"),
        (saved([[0, 0], [1, 2]]), {}, "placements: mlp: expert_of_slot = [[0, 0], [1, 2]] must name each expert"),
        (
            saved([[0, 1, 2], [3, 4, 5]]),
            {},
            "placements: mlp: 6 experts, the model's layer has 4. Build the model that was saved.",
        ),
        (
            saved(ALL, record=Record({"ep_size_2": PAIRS, "ep_size_4": ALL}, {}, {"mlp": ALL}), is_universal=True),
            {"universal": True},
            "runs/step5: saved with 2 values of ep_size, this run has 1, and so other parameter groups.",
        ),
        (saved(), {"universal": True}, "runs/step5: is no universal checkpoint"),
        (saved(is_universal=True), {}, "runs/step5: is a universal checkpoint"),
        (
            saved(is_universal=True, record=None),
            {"universal": True},
            "Its experts had moved, and DeepSpeed's own converter joins them by slot.",
        ),
        (
            saved(ALL, is_universal=True),
            {"universal": True, "zero_stage": 0},
            "runs/step5: a run without ZeRO does not load universal checkpoints.",
        ),
    ],
)
def test_refusals(checkpoint: SavedCheckpoint, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        plan(checkpoint, **options)
    assert message in str(error.value)


def test_deepspeeds_description_of_a_layer() -> None:
    entry = {"num_experts": 4, "num_local_experts": 2}
    ranks = [{"rank": 0, "experts": [3, 0]}, {"rank": 1, "experts": [1, 2]}]
    assert described_slots(entry) == [[0, 1], [2, 3]]
    assert described_slots({**entry, "expert_placement": {"ranks": ranks}}) == MOVED
