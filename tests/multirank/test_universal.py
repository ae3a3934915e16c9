"""A checkpoint is loaded at other sizes, after experts have moved: every state, bit for bit, in logical order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hybrid
from ds_hybrid.engine.universal import convert
from ds_hybrid.errors import CheckpointError
from tests.multirank import explicit
from tests.multirank.explicit import EXPERTS, HIDDEN, Setup, Toy
from tests.multirank.states import differences, logical_states
from tests.multirank.test_checkpoint import AdamRun, make_explicit_engine, place_anew, train, train_explicit
from tests.multirank.test_expert_groups import other_groups
from tests.multirank.training import batch, make_engine
from tests.ranks import RankPool


@dataclass(frozen=True)
class ResumedRun(AdamRun):
    universal: bool = False

    def ds_config(self) -> dict[str, Any]:
        return {**super().ds_config(), "checkpoint": {"load_universal": self.universal}}


@dataclass(frozen=True)
class ResumedSetup(Setup):
    """``other_ep_size`` is that of a second layer, if there is to be one."""

    universal: bool = False
    other_ep_size: int | None = None

    def ds_config(self, *, optimizer: bool = True) -> dict[str, Any]:
        return {**super().ds_config(optimizer=optimizer), "checkpoint": {"load_universal": self.universal}}


Case = ResumedRun | ResumedSetup


class TwoSizes(Toy):
    """Layers whose experts are parted in different ways."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        assert isinstance(setup, ResumedSetup)
        self.other = ds_hybrid.MoE(
            HIDDEN, lambda: nn.Linear(HIDDEN, HIDDEN), EXPERTS, ep_size=setup.other_ep_size or 1, k=2, seed=2
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self.other(tokens)[0])


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    pools = {size: RankPool(size) for size in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


RUN = ResumedRun(ep_size=4)
SETUP = ResumedSetup(ep_size=4, num_steps=2)


@pytest.mark.parametrize(
    "case",
    [
        replace(RUN, zero_stage=0),
        replace(RUN, zero_stage=1),
        replace(RUN, zero_stage=2, ep_size=2, expert_groups=[[0, 3], [1, 2]]),
        replace(RUN, zero_stage=3),
        replace(RUN, zero_stage=1, zero_options={"round_robin_gradients": True}),
        replace(RUN, zero_stage=2, bf16=True),
        replace(RUN, zero_stage=1, ep_size=2, trained=("self_attn",)),
        replace(RUN, zero_stage=1, model_type="deepseek_v3"),
        replace(SETUP, zero_stage=0, ep_size=2),
        replace(SETUP, zero_stage=1, options={"score": "sigmoid", "bias_update_rate": 0.1}),
        replace(SETUP, zero_stage=2, ep_size=2),
        replace(SETUP, zero_stage=0, other_ep_size=2),
        replace(SETUP, zero_stage=1, other_ep_size=2),
    ],
    ids=lambda case: f"{type(case).__name__}-{case.zero_stage}-{case.ep_size}",
)
def test_every_state_is_loaded_at_other_sizes(pools: dict[int, RankPool], tmp_path: Path, case: Case) -> None:
    pools[4].run(save, case, str(tmp_path))
    other = {2: 4, 4: 2}[case.ep_size]
    targets = [(4, other), (2, 2)] if isinstance(case, ResumedRun) else [(4, other), (4, 1), (2, 2)]
    if isinstance(case, ResumedSetup) and case.other_ep_size:
        targets = [(4, 1), (2, 1)]
    for num_ranks, ep_size in targets:
        target = replace(case, ep_size=ep_size, universal=case.zero_stage > 0, zero_options={}, **_default_groups(case))
        for changed, error in pools[num_ranks].run(load, target, str(tmp_path)):
            if not case.zero_options:  # in turns, DeepSpeed's own view of its states is wrong
                assert changed == [], (num_ranks, ep_size)
            assert error < (5e-3 if case.bf16 else 1e-5)


@pytest.mark.parametrize("case", [RUN, replace(RUN, zero_stage=3), SETUP])
def test_other_sizes_are_refused_with_the_way_out(pools: dict[int, RankPool], tmp_path: Path, case: Case) -> None:
    """And the weights alone are loaded, where they do not lie in the optimizer's shards."""
    pools[4].run(save, case, str(tmp_path))
    message = (
        f'{tmp_path}/saved: saved with ep_size 4 on 4 ranks, this run has ep_size 2 on 2. Run "ds_hybrid universal '
        f'{tmp_path} --tag saved" and load with checkpoint.load_universal = true in the ds_config.'
    )
    for found, error in pools[2].run(refusal_and_weights, replace(case, ep_size=2), str(tmp_path)):
        assert found == message
        assert error < 1e-5


def test_kinds_of_checkpoints_are_told_apart(pools: dict[int, RankPool], tmp_path: Path) -> None:
    pools[4].run(save, SETUP, str(tmp_path))
    universal = f"{tmp_path}/saved_universal"
    expected = [
        f"{universal}: is a universal checkpoint, and the ds_config has checkpoint.load_universal = false. Set it to "
        "true.",
        f"{tmp_path}/saved: is no universal checkpoint, and the ds_config has checkpoint.load_universal = true. Run "
        '"ds_hybrid universal" on it first, or set it to false.',
        f"{universal}/ds_hybrid.json: missing. Its experts had moved, and DeepSpeed's own converter joins them by "
        'slot. Convert the checkpoint with "ds_hybrid universal".',
        f"{universal}: exists already. Remove it to convert saved again.",
    ]
    assert pools[4].run(refusals, SETUP, str(tmp_path)) == [expected] * 4


def _default_groups(case: Case) -> dict[str, Any]:
    return {"expert_groups": "auto"} if isinstance(case, ResumedRun) else {}


def make(case: Case) -> Any:
    if isinstance(case, ResumedRun):
        return make_engine(case)
    return make_explicit_engine(case, Toy if case.other_ep_size is None else TwoSizes)


def loss(engine: Any, case: Case) -> float:
    """Of one batch, the same on every rank and in every run."""
    engine.eval()
    with torch.no_grad():
        if isinstance(case, ResumedRun):
            ids = batch(99, 0)
            value = engine(input_ids=ids, labels=ids).loss
        else:
            value = explicit.loss_of(replace(case, aux=0.0), engine(explicit.batch(case, 0, 0, 0)))
    engine.train()
    return float(value)


def save(case: Case, folder: str) -> None:
    """Of experts that lie anywhere; and what it is to be compared with, and the universal one if there can be one."""
    with other_groups():
        engine = make(case)
        place_anew(engine, seed=5)
        change_untrained(engine.module)
        if isinstance(case, ResumedRun):
            train(engine, range(2))
        else:
            train_explicit(engine, case)
        engine.save_checkpoint(folder, "saved")
        noted = logical_states(engine), loss(engine, case)
        if dist.get_rank() == 0:
            torch.save(noted, Path(folder, "noted"))
            if case.zero_stage:
                convert(folder)
        dist.barrier()
        engine.destroy()


def change_untrained(module: nn.Module) -> None:
    """What a new engine would have by itself need not be loaded."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, tensor in module.state_dict().items():
        if name not in trained and tensor.is_floating_point():
            tensor.mul_(1.5).add_(0.01)


def load(case: Case, folder: str) -> tuple[list[str], float]:
    """What differs from the saved states, and the difference of the loss."""
    with other_groups():
        engine = make(case)
        engine.load_checkpoint(folder)
        states, value = torch.load(Path(folder, "noted"))
        changed = differences(logical_states(engine), states)
        error = abs(loss(engine, case) - value)
        assert engine.global_steps == 2
        engine.destroy()
    return changed, error


def refusal_and_weights(case: Case, folder: str) -> tuple[str, float]:
    engine = make(case)
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder)
    difference = 0.0
    if case.zero_stage < 3:
        engine.load_checkpoint(folder, load_optimizer_states=False)
        difference = abs(loss(engine, case) - torch.load(Path(folder, "noted"))[1])
    engine.destroy()
    return str(error.value), difference


def refusals(case: Case, folder: str) -> list[str]:
    messages = []
    engine = make(case)
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder, "saved_universal")
    messages.append(str(error.value))
    engine.destroy()
    engine = make(replace(case, universal=True))
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder, "saved")
    messages.append(str(error.value))
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "saved_universal", "ds_hybrid.json").unlink()
    dist.barrier()
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder)
    messages.append(str(error.value))
    engine.destroy()
    with pytest.raises(CheckpointError) as error:
        convert(folder, "saved")
    return [*messages, str(error.value)]
