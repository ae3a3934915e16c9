"""A resumed run goes on as if it had not stopped, wherever the experts were, with one and two replicas of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from ds_hybrid.dispatch.predict import GroupSpeed
from ds_hybrid.engine import auto_dispatch
from ds_hybrid.errors import CheckpointError
from ds_hybrid.placement import ExpertPlacement
from tests.multirank import explicit
from tests.multirank.explicit import Setup, Toy
from tests.multirank.states import States, differences, logical_states, random_placement
from tests.multirank.test_expert_groups import other_groups
from tests.multirank.training import Run, batch, gather_parameters, make_engine
from tests.ranks import RankPool


@dataclass(frozen=True)
class AdamRun(Run):
    """With moments, and experts that start elsewhere when ``seed`` is given: that is another model, trained as well."""

    seed: int | None = 7

    def ds_config(self) -> dict[str, Any]:
        adam = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
        return {**super().ds_config(), "optimizer": adam}


@dataclass(frozen=True)
class EagerRun(AdamRun):
    """Every second step it moves whatever gains anything."""

    def ds_config(self) -> dict[str, Any]:
        config = super().ds_config()
        config["ds_hybrid"]["rebalance"] = {
            "enabled": True,
            "interval": 2,
            "load_half_life": 3,
            "horizon": 10**6,
            "min_gain": 0.0,
        }
        return config


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ep_size", [2, 4])
def test_resume_equals_not_stopping(four_ranks: RankPool, tmp_path: Path, zero_stage: int, ep_size: int) -> None:
    run = AdamRun(zero_stage=zero_stage, ep_size=ep_size)
    for straight, resumed in four_ranks.run(losses_of_both, run, str(tmp_path)):
        assert resumed == straight


def test_bf16_resumes_its_masters(four_ranks: RankPool, tmp_path: Path) -> None:
    for straight, resumed in four_ranks.run(losses_of_both, AdamRun(bf16=True, zero_stage=2), str(tmp_path)):
        assert resumed == straight


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_explicit_layers_are_resumed(four_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    for changed in four_ranks.run(explicit_states_that_change, Setup(zero_stage=zero_stage), str(tmp_path)):
        assert changed == []


def test_an_older_checkpoint_brings_back_its_placement(four_ranks: RankPool, tmp_path: Path) -> None:
    assert four_ranks.run(return_to_older_ones, str(tmp_path)) == [[]] * 4


def test_records_that_are_not_of_the_files_are_refused_on_every_rank(four_ranks: RankPool, tmp_path: Path) -> None:
    folder = f"{tmp_path}/saved"
    layer = f"{folder}/ds_hybrid.json: placements: model.layers.0.mlp"
    explicit_layer = f"{tmp_path}/explicit/ds_hybrid.json: placements: moe"
    swapped, straight = [[4, 1, 2, 3], [0, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]
    other = "The record belongs to another checkpoint. Copy it from where the other files come from."
    expected = [
        f"{folder}/ds_hybrid.json: missing. It tells which rank and slot holds which expert, and the other files were "
        "saved with it. Copy it from where they come from.",
        f"{folder}/ds_hybrid.json: KeyError: 'placements'. It is not the file that was saved with the checkpoint.",
        f"{layer}: {straight}, the other files have {swapped}. {other}",
        f"{layer}: missing. The model has another MoE layer than the checkpoint.",
        f"{explicit_layer}: [[0, 1], [2, 3]], the other files have [[0, 2], [1, 3]]. {other}",
    ]
    for messages in four_ranks.run(refusals, str(tmp_path)):
        assert messages == expected


def test_what_moves_experts_is_resumed(four_ranks: RankPool, tmp_path: Path) -> None:
    """The loads that it knows, how patient it is with each layer, and where its moves have brought the experts."""
    for kept, resumed, losses, straight in four_ranks.run(
        rebalanced, EagerRun(seed=None, mode="alltoall"), str(tmp_path)
    ):
        assert resumed == kept
        assert any(layer["load"] for layer in kept[0].values())
        assert kept[1] != [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2, "nothing has moved"
        assert losses == pytest.approx(straight, abs=1e-6, rel=0)


def test_dispatchers_of_auto_are_resumed(four_ranks: RankPool, tmp_path: Path) -> None:
    """They changed after the first step; the new engine begins with them, and its next choice is as far away."""
    for straight, resumed in four_ranks.run(losses_of_auto, str(tmp_path)):
        assert resumed == straight


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_named_groups_are_resumed_and_others_refused(four_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    """The masters of experts lie where their ranks were, so other groups would mix them up in silence."""
    run = AdamRun(zero_stage=zero_stage, expert_groups=[[0, 3], [1, 2]])
    message = (
        f"{tmp_path}/global_step2: saved with the expert groups [[0, 3], [1, 2]], this run has [[0, 2], [1, 3]]. Set "
        "ds_hybrid.topology.expert_groups to [[0, 3], [1, 2]]."
    )
    for (straight, resumed), refusal in four_ranks.run(losses_and_refusal, run, str(tmp_path)):
        assert resumed == straight
        assert refusal == message


def test_a_checkpoint_of_deepspeed_is_loaded_and_client_state_is_the_users(
    four_ranks: RankPool, tmp_path: Path
) -> None:
    """DeepSpeed's has the experts in order, and puts them there."""
    assert four_ranks.run(client_states, str(tmp_path)) == [({"epoch": 3}, {"epoch": 4})] * 4


def test_ranks_with_different_tags_say_so(four_ranks: RankPool, tmp_path: Path) -> None:
    message = (
        'save_checkpoint(tag="step0"): that is the tag of rank 0; rank 1 has "step1". Give all ranks the same tag.'
    )
    assert four_ranks.run(refusal_of_tags, str(tmp_path)) == [message] * 4


def test_an_experts_file_holds_that_expert_alone(four_ranks: RankPool, tmp_path: Path) -> None:
    """DeepSpeed once stored the whole flat buffer with each of them."""
    four_ranks.run(save_once, str(tmp_path))
    files = sorted(tmp_path.glob("once/layer_*_expert_*"))
    assert len(files) == 2 * 8
    for file in files:
        tensors = torch.load(file, weights_only=True).values()
        assert file.stat().st_size < 1.2 * sum(t.numel() * t.element_size() for t in tensors) + 2000  # names, zip


def losses_of_auto(folder: str) -> tuple[list[float], list[float]]:
    waiting = GroupSpeed(latency=1.0, bandwidth=1e12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_dispatch, "measure_link", lambda group: waiting)
        return losses_of_both(AdamRun(mode="auto", ep_size=4, seed=None), folder)


def losses_and_refusal(run: AdamRun, folder: str) -> tuple[tuple[list[float], list[float]], str]:
    with other_groups():
        losses = losses_of_both(run, folder)
    with other_groups():
        engine = make_engine(replace(run, expert_groups=[[0, 2], [1, 3]]))
        before = gather_parameters(engine.module)
        with pytest.raises(CheckpointError) as error:
            engine.load_checkpoint(folder)
        after = gather_parameters(engine.module)
        assert all(torch.equal(after[name], before[name]) for name in before)
        if run.zero_stage < 3:
            engine.load_checkpoint(folder, load_module_only=True)
        engine.destroy()
    return losses, str(error.value)


def client_states(folder: str) -> tuple[Any, Any]:
    """After loading a checkpoint of ours, and one that DeepSpeed's own method has written."""
    engine = make_engine(Run(num_steps=1))
    engine.save_checkpoint(folder, "ours", {"epoch": 3})
    deepspeed.DeepSpeedEngine.save_checkpoint(engine, folder, "theirs", {"epoch": 4})
    loaded = []
    for tag in ("ours", "theirs"):
        place_anew(engine, seed=1)
        state = engine.load_checkpoint(folder, tag)[1]
        loaded.append({key: value for key, value in state.items() if key in ("epoch", "ds_hybrid")})
        assert all(layer.placement == ExpertPlacement.contiguous(8, 2) for layer in layers_of(engine))
    engine.destroy()
    return tuple(loaded)


def losses_of_both(run: AdamRun, folder: str) -> tuple[list[float], list[float]]:
    """Losses of steps 2 and 3, experts moving before each: straight on after a save, and in an engine that loaded."""
    straight = make_engine(run)
    if run.seed is not None:
        place_anew(straight, seed=run.seed)
    train_moving(straight, run, range(2))
    straight.save_checkpoint(folder)
    state, states = straight._auto_dispatch.state(), logical_states(straight)
    placements = [layer.placement for layer in layers_of(straight)]
    expected = train_moving(straight, run, range(2, 4))
    straight.destroy()
    resumed = make_engine(run)
    resumed.load_checkpoint(folder)
    assert resumed._auto_dispatch.state() == state
    assert run.mode != "auto" or set(state["modes"].values()) == {"alltoall"}
    assert [layer.placement for layer in layers_of(resumed)] == placements
    assert differences(logical_states(resumed), states) == []
    losses = train_moving(resumed, run, range(2, 4))
    resumed.destroy()
    return expected, losses


def train_moving(engine: Any, run: AdamRun, steps: range) -> list[float]:
    losses = []
    for step in steps:
        if step and run.seed is not None:
            layers = engine.moe_layers_by_name()
            engine.move_experts({name: random_placement(layer, seed=step) for name, layer in layers.items()})
        losses += train(engine, range(step, step + 1))
    return losses


def rebalanced(run: EagerRun, folder: str) -> tuple[Any, Any, list[float], list[float]]:
    """The rebalancer's state and the placements, as saved and as loaded; then the losses, resumed and straight."""

    def state(engine: Any) -> Any:
        return engine._rebalancer.state(), [layer.placement.expert_of_slot.tolist() for layer in layers_of(engine)]

    straight = make_engine(run)
    train(straight, range(5))
    straight.save_checkpoint(folder)
    kept = state(straight)
    expected = train(straight, range(5, 8))
    straight.destroy()
    resumed = make_engine(run)
    resumed.load_checkpoint(folder)
    loaded = state(resumed)
    losses = train(resumed, range(5, 8))
    resumed.destroy()
    return kept, loaded, losses, expected


def explicit_states_that_change(setup: Setup, folder: str) -> list[str]:
    engine = make_explicit_engine(setup)
    place_anew(engine, seed=3)
    train_explicit(engine, setup)
    engine.save_checkpoint(folder)
    saved = logical_states(engine)
    placement = engine.module.moe.placement
    engine.destroy()
    engine = make_explicit_engine(setup)
    engine.load_checkpoint(folder)
    assert engine.module.moe.placement == placement
    changed = differences(logical_states(engine), saved)
    engine.destroy()
    return changed


def return_to_older_ones(folder: str) -> list[str]:
    """What differs after an engine whose experts have moved loads what it saved before, in turn."""
    engine = make_engine(AdamRun())
    kept: dict[str, tuple[list[ExpertPlacement], States]] = {}
    for step, tag in enumerate(("first", "second")):
        place_anew(engine, seed=step)
        train(engine, range(step, step + 1))
        engine.save_checkpoint(folder, tag)
        kept[tag] = [layer.placement for layer in layers_of(engine)], logical_states(engine)
    changed = []
    for tag in ("first", "second"):
        place_anew(engine, seed=9)
        engine.load_checkpoint(folder, tag)
        placements, states = kept[tag]
        assert [layer.placement for layer in layers_of(engine)] == placements
        changed += differences(logical_states(engine), states)
    engine.destroy()
    return changed


def refusals(folder: str) -> list[str]:
    """The messages for records that are not those of the files; nothing of the engine changes."""
    engine = make_engine(AdamRun())
    swapped, straight = [[4, 1, 2, 3], [0, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]
    for layer in layers_of(engine):
        layer.place(ExpertPlacement.from_slots(swapped))
    engine.save_checkpoint(folder, "saved")
    record = Path(folder, "saved", "ds_hybrid.json")
    whole = json.loads(record.read_text())
    placements = whole["placements"]
    spoilt: list[Any] = [
        None,
        {key: value for key, value in whole.items() if key != "placements"},
        {**whole, "placements": {**placements, "model.layers.0.mlp": straight}},
        {**whole, "placements": {"model.layers.1.mlp": swapped}},
    ]
    messages = [refusal(engine, record, content) for content in spoilt]
    engine.destroy()

    setup = Setup()
    engine = make_explicit_engine(setup)
    engine.module.moe.place(ExpertPlacement.from_slots([[0, 2], [1, 3]]))
    engine.save_checkpoint(folder, "explicit")
    record = Path(folder, "explicit", "ds_hybrid.json")
    whole = json.loads(record.read_text())
    messages.append(refusal(engine, record, {**whole, "placements": {"moe": [[0, 1], [2, 3]]}}))
    engine.destroy()
    return messages


def refusal(engine: Any, record: Path, content: Any) -> str:
    dist.barrier()
    if dist.get_rank() == 0:
        record.unlink(missing_ok=True)
        if content is not None:
            record.write_text(json.dumps(content))
    dist.barrier()
    before = [layer.placement for layer in layers_of(engine)]
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(str(record.parent.parent), record.parent.name)
    assert [layer.placement for layer in layers_of(engine)] == before
    return str(error.value)


def refusal_of_tags(folder: str) -> str:
    engine = make_engine(Run(num_steps=1))
    with pytest.raises(CheckpointError) as error:
        engine.save_checkpoint(folder, f"step{dist.get_rank()}")
    engine.destroy()
    assert not Path(folder).exists() or not list(Path(folder).iterdir())
    return str(error.value)


def save_once(folder: str) -> None:
    engine = make_engine(Run())
    engine.save_checkpoint(folder, "once")
    engine.destroy()


def layers_of(engine: Any) -> list[Any]:
    return list(engine.moe_layers_by_name().values())


def place_anew(engine: Any, *, seed: int) -> None:
    for number, layer in enumerate(layers_of(engine)):
        layer.place(random_placement(layer, seed=100 * seed + number))


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = batch(step, dist.get_rank())
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def make_explicit_engine(setup: Setup, toy: Callable[[Setup], Toy] = Toy) -> Any:
    module = toy(setup)
    return explicit.make_engine(setup, module, optimizer=torch.optim.AdamW(module.parameters(), lr=0.01))


def train_explicit(engine: Any, setup: Setup) -> None:
    for step in range(setup.num_steps):
        tokens = explicit.batch(setup, step, dist.get_rank(), 0)
        engine.backward(explicit.loss_of(setup, engine(tokens)))
        engine.step()
