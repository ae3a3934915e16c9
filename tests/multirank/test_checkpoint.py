"""A resumed run goes on as if it had not stopped, under every ZeRO stage, with one and two replicas of each expert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from ds_hybrid.dispatch.predict import GroupSpeed
from ds_hybrid.engine import auto_dispatch
from ds_hybrid.errors import CheckpointError
from tests.multirank.test_expert_groups import other_groups
from tests.multirank.training import Run, batch, gather_parameters, make_engine
from tests.ranks import RankPool


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ep_size", [2, 4])
def test_resume_equals_not_stopping(four_ranks: RankPool, tmp_path: Path, zero_stage: int, ep_size: int) -> None:
    for straight, resumed in four_ranks.run(losses_of_both, Run(zero_stage=zero_stage, ep_size=ep_size), str(tmp_path)):
        assert resumed == straight


def test_dispatchers_of_auto_are_resumed(four_ranks: RankPool, tmp_path: Path) -> None:
    """They changed after the first step; the new engine begins with them, and its next choice is as far away."""
    for straight, resumed in four_ranks.run(losses_of_auto, str(tmp_path)):
        assert resumed == straight


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_named_groups_are_resumed_and_others_refused(four_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    """The masters of experts lie where their ranks were, so other groups would mix them up in silence."""
    run = Run(zero_stage=zero_stage, expert_groups=[[0, 3], [1, 2]])
    message = (
        f"{tmp_path}: saved with the expert groups [[0, 3], [1, 2]], this run has [[0, 2], [1, 3]]. Set "
        "ds_hybrid.topology.expert_groups to [[0, 3], [1, 2]]."
    )
    for (straight, resumed), refusal in four_ranks.run(losses_and_refusal, run, str(tmp_path)):
        assert resumed == straight
        assert refusal == message


def test_a_checkpoint_of_deepspeed_is_loaded_and_client_state_is_the_users(
    four_ranks: RankPool, tmp_path: Path
) -> None:
    assert four_ranks.run(client_states, str(tmp_path)) == [({"epoch": 3}, {"epoch": 4})] * 4


def losses_of_auto(folder: str) -> tuple[list[float], list[float]]:
    waiting = GroupSpeed(latency=1.0, bandwidth=1e12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_dispatch, "measure_link", lambda group: waiting)
        return losses_of_both(Run(mode="auto", ep_size=4), folder)


def losses_and_refusal(run: Run, folder: str) -> tuple[tuple[list[float], list[float]], str]:
    with other_groups():
        losses = losses_of_both(run, folder)
    with other_groups():
        engine = make_engine(replace(run, expert_groups=[[0, 2], [1, 3]]))
        before = gather_parameters(engine.module)
        with pytest.raises(CheckpointError) as error:
            engine.load_checkpoint(folder)
        after = gather_parameters(engine.module)
        assert all(torch.equal(after[name], before[name]) for name in before)
        engine.load_checkpoint(folder, load_module_only=True)
        engine.destroy()
    return losses, str(error.value)


def client_states(folder: str) -> tuple[Any, Any]:
    """After loading a checkpoint of ours, and one that DeepSpeed's own method has written."""
    engine = make_engine(Run(num_steps=1))
    engine.save_checkpoint(folder, "ours", {"epoch": 3})
    deepspeed.DeepSpeedEngine.save_checkpoint(engine, folder, "theirs", {"epoch": 4})
    loaded = tuple(
        {key: value for key, value in engine.load_checkpoint(folder, tag)[1].items() if key in ("epoch", "ds_hybrid")}
        for tag in ("ours", "theirs")
    )
    engine.destroy()
    return loaded  # type: ignore[return-value]


def losses_of_both(run: Run, folder: str) -> tuple[list[float], list[float]]:
    """Losses of steps 2 and 3: straight on after a save at step 2, and in a new engine that loaded it."""
    straight = make_engine(run)
    _train(straight, range(2))
    straight.save_checkpoint(folder)
    state = straight._auto_dispatch.state()
    expected = _train(straight, range(2, 4))
    straight.destroy()
    resumed = make_engine(run)
    resumed.load_checkpoint(folder)
    assert resumed._auto_dispatch.state() == state
    assert run.mode != "auto" or set(state["modes"].values()) == {"alltoall"}
    losses = _train(resumed, range(2, 4))
    resumed.destroy()
    return expected, losses


def _train(engine: object, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = batch(step, dist.get_rank())
        loss = engine(input_ids=ids, labels=ids).loss  # type: ignore[operator]
        engine.backward(loss)  # type: ignore[attr-defined]
        engine.step()  # type: ignore[attr-defined]
        losses.append(float(loss.detach()))
    return losses
