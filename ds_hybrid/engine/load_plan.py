"""How a checkpoint is loaded into a run: decided before anything changes, from what every rank knows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_hybrid.engine.checkpoint import RECORD_NAME, SavedCheckpoint, Slots, is_in_order, recorded_placements
from ds_hybrid.errors import CheckpointError
from ds_hybrid.placement import ExpertPlacement


@dataclass(frozen=True)
class LoadPlan:
    """How a checkpoint is loaded into a run.

    Attributes:
        placements: of the experts in this run, by layer.
        saved_placements: of the experts in the files.
        parts_optimizer_anew: without ZeRO, with other expert-parallel groups: DeepSpeed would not load its state.
    """

    placements: Mapping[str, ExpertPlacement]
    saved_placements: Mapping[str, ExpertPlacement]
    parts_optimizer_anew: bool = False


def plan_load(
    saved: SavedCheckpoint,
    layers: Mapping[str, ExpertPlacement],
    groups: Mapping[str, Slots],
    *,
    world_size: int,
    zero_stage: int,
    universal: bool,
    with_optimizer: bool,
    optimizer_is_torchs: bool,
) -> LoadPlan:
    """Decide, from what every rank knows, how to load.

    Args:
        layers: the present placements by layer.
        groups: the present expert-parallel groups by DeepSpeed's names.
        world_size: the data-parallel ranks of this run.
        universal: ``checkpoint.load_universal`` of the ds_config.
        with_optimizer: whether its state is to be loaded.
        optimizer_is_torchs: whether DeepSpeed steps one of torch's optimizers as it is.

    Raises:
        CheckpointError: it cannot be loaded, or not so.
    """
    _check_universal(saved, wanted=universal)
    if universal:
        if zero_stage == 0:
            raise CheckpointError(
                f"{saved.folder}: a run without ZeRO does not load universal checkpoints. Set zero_optimization.stage "
                "to 1; or let a run without ZeRO save, whose checkpoints load at other sizes as they are."
            )
        then = saved.record.expert_groups if saved.record else {}
        if then and len(then) != len(groups):
            raise CheckpointError(
                f"{saved.folder}: saved with {len(then)} values of ep_size, this run has {len(groups)}, and so other "
                "parameter groups. Let layers that had different values have different ones."
            )
        ordered = {name: ExpertPlacement.contiguous(p.num_experts, p.num_ranks) for name, p in layers.items()}
        return LoadPlan(ordered, ordered)
    before = _saved_placements(saved, layers)
    takes_shards = zero_stage == 3 or (zero_stage > 0 and with_optimizer)
    placements = _fit_sizes(saved, before, layers, world_size=world_size, takes_shards=takes_shards)
    resized = any(before[name].num_ranks != placements[name].num_ranks for name in layers)
    if takes_shards or (with_optimizer and not resized):
        _check_groups(saved, groups)
    if with_optimizer and resized and (not optimizer_is_torchs or saved.optimizer_names is None):
        raise CheckpointError(
            f"{saved.folder}: saved with other expert-parallel groups. Without ZeRO, masters of a low precision are "
            "not parted anew. Load it with load_optimizer_states=False, or let it be saved with ZeRO 1."
        )
    return LoadPlan(placements, before, parts_optimizer_anew=with_optimizer and resized)


def _saved_placements(saved: SavedCheckpoint, layers: Mapping[str, ExpertPlacement]) -> dict[str, ExpertPlacement]:
    """Where the checkpoint has the experts of each layer of a model.

    Args:
        layers: the model's MoE layers by name, with any placement of their experts: it tells how many there are.

    Raises:
        CheckpointError: as :func:`recorded_placements`, or the model has other layers.
    """
    placements = recorded_placements(saved)
    if saved.record is None:  # DeepSpeed's own names only converted layers
        contiguous = {name: ExpertPlacement.contiguous(now.num_experts, now.num_ranks) for name, now in layers.items()}
        placements = contiguous | placements
    for name, now in layers.items():
        place = f"{saved.folder}/{RECORD_NAME}: placements: {name}"
        if name not in placements:
            raise CheckpointError(f"{place}: missing. The model has another MoE layer than the checkpoint.")
        if placements[name].num_experts != now.num_experts:
            raise CheckpointError(
                f"{place}: {placements[name].num_experts} experts, the model's layer has {now.num_experts}. "
                "Build the model that was saved."
            )
    return {name: placements[name] for name in layers}


def _fit_sizes(
    saved: SavedCheckpoint,
    placements: Mapping[str, ExpertPlacement],
    layers: Mapping[str, ExpertPlacement],
    *,
    world_size: int,
    takes_shards: bool,
) -> dict[str, ExpertPlacement]:
    """The saved placements on as many ranks as there are now: a file for each slot goes to whoever has that slot.

    Args:
        world_size: the data-parallel ranks of this run.
        takes_shards: whether states are to be loaded that lie parted over the ranks that saved them.

    Raises:
        CheckpointError: such states, and the sizes are others.
    """
    now = sorted({layer.num_ranks for layer in layers.values()})
    then = sorted({placement.num_ranks for placement in placements.values()})
    if takes_shards and (then != now or saved.world_size not in (None, world_size)):
        root, _, tag = saved.folder.rpartition("/")
        raise CheckpointError(
            f"{saved.folder}: saved with ep_size {_list(then)} on {saved.world_size} ranks, this run has ep_size "
            f'{_list(now)} on {world_size}. Run "ds_hybrid universal {root} --tag {tag}" and load with '
            "checkpoint.load_universal = true in the ds_config."
        )
    return {
        name: ExpertPlacement.from_slots(placement.expert_of_slot.reshape(layers[name].num_ranks, -1))
        for name, placement in placements.items()
    }


def _check_universal(saved: SavedCheckpoint, *, wanted: bool) -> None:
    """A universal checkpoint is loaded as one, and is one of ours where DeepSpeed's converter goes wrong.

    Args:
        wanted: ``checkpoint.load_universal`` of the ds_config.

    Raises:
        CheckpointError: it is the other kind, or its experts are mixed up.
    """
    if saved.is_universal != wanted:
        kind = "a universal checkpoint" if saved.is_universal else "no universal checkpoint"
        raise CheckpointError(
            f"{saved.folder}: is {kind}, and the ds_config has checkpoint.load_universal = {str(wanted).lower()}. "
            + (
                "Set it to true."
                if saved.is_universal
                else 'Run "ds_hybrid universal" on it first, or set it to false.'
            )
        )
    moved = not all(map(is_in_order, (saved.carried or {}).values()))
    if wanted and moved and saved.record is None:
        raise CheckpointError(
            f"{saved.folder}/{RECORD_NAME}: missing. Its experts had moved, and DeepSpeed's own converter joins them "
            'by slot. Convert the checkpoint with "ds_hybrid universal".'
        )


def _check_groups(saved: SavedCheckpoint, present: Mapping[str, Slots]) -> None:
    """The optimizer's shards of experts fit only the ranks that held them.

    Raises:
        CheckpointError: the same ranks form other groups of one size now.
    """
    if saved.record is None:
        return
    for name, groups in present.items():
        held = saved.record.expert_groups.get(name)
        if held is None or sum(map(len, held)) != sum(map(len, groups)):
            continue  # groups of another size, or another world: other rules hold
        if [list(group) for group in held] != [list(group) for group in groups]:
            raise CheckpointError(
                f"{saved.folder}: saved with the expert groups {held}, this run has {groups}. Set "
                f"ds_hybrid.topology.expert_groups to {held}."
            )


def _list(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
