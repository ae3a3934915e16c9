"""Experts that move at random during training change nothing: state bit for bit, and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.fragments import Fragment, StateFinder
from ds_hybrid.rebalance.migrate import CHECK_BYTES
from tests.multirank import explicit
from tests.multirank.expert_states import States, expert_states
from tests.multirank.test_expert_groups import other_groups
from tests.multirank.training import Run, batch, make_engine
from tests.ranks import RankPool

NUM_STEPS = 20
EVERY = 2
CONVERTED = Run(mode="alltoall", adam=True, accumulation=2, checkpointing=False, clip=1.0)
EXPLICIT = explicit.Setup(
    adam=True, accumulation=2, checkpointing=False, clip=1.0, dispatch={"mode": "alltoall"}, lengths=(6, 5, 0, 3)
)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
PERSISTENT = {"stage3_param_persistence_threshold": 10**6}
SHARDED = {"stage3_param_persistence_threshold": 0}


@dataclass(frozen=True)
class Outcome:
    """A run with moves against one without.

    Attributes:
        wrong: how many states of experts, after all moves together, were not bit for bit what they were before.
        num_moved: experts that changed their rank, in all moves.
        loss_error: the largest difference of a loss.
        bytes_off: how far the bytes that left this rank were from the prediction.
        bytes_too_many: staged at once, beyond two experts' state, checksums and filled-up words.
    """

    wrong: int
    num_moved: int
    loss_error: float
    bytes_off: int
    bytes_too_many: int


DTYPES = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
SHORT = 4
"""Steps, of which two are followed by a move."""


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


@DTYPES
@pytest.mark.parametrize(
    ("zero_stage", "zero_options"), [(0, {}), (1, {}), (2, {}), (3, SHARDED)], ids=["0", "1", "2", "3"]
)
def test_converted_layers(four_ranks: RankPool, zero_stage: int, zero_options: dict[str, Any], bf16: bool) -> None:
    """Two ranks of an expert-parallel group, two replicas of each expert."""
    run = replace(CONVERTED, zero_stage=zero_stage, zero_options=zero_options, bf16=bf16)
    for outcome in four_ranks.run(compare, run):
        check(outcome, bf16=bf16)


@DTYPES
@pytest.mark.parametrize(
    ("ep_size", "zero_stage", "zero_options"),
    [
        pytest.param(4, 0, {}, id="EP=4, ZeRO 0"),
        pytest.param(4, 1, {}, id="EP=4, ZeRO 1"),
        pytest.param(4, 2, {}, id="EP=4, ZeRO 2"),
        pytest.param(4, 3, SHARDED, id="EP=4, ZeRO 3"),
        pytest.param(2, 3, PERSISTENT, id="ZeRO 3 persistent"),
        pytest.param(2, 1, OFFLOAD, id="ZeRO 1 offload"),
        pytest.param(2, 2, OFFLOAD, id="ZeRO 2 offload"),
        pytest.param(2, 3, OFFLOAD | SHARDED, id="ZeRO 3 offload"),
    ],
)
def test_other_sizes_and_options(
    four_ranks: RankPool, ep_size: int, zero_stage: int, zero_options: dict[str, Any], bf16: bool
) -> None:
    run = replace(CONVERTED, zero_stage=zero_stage, zero_options=zero_options, ep_size=ep_size, bf16=bf16)
    for outcome in four_ranks.run(compare, replace(run, num_steps=SHORT)):
        check(outcome, bf16=bf16)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_round_robin_partitions(four_ranks: RankPool, zero_stage: int) -> None:
    """By the losses: DeepSpeed's own view of its states is wrong here."""
    run = replace(CONVERTED, zero_stage=zero_stage, zero_options={"round_robin_gradients": True}, num_steps=6)
    for outcome in four_ranks.run(compare, run):
        assert outcome.loss_error <= 1e-6
        assert outcome.num_moved > 0


FROZEN = ("self_attn", "gate.weight")
"""What trains where experts do not."""


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(replace(CONVERTED, bf16=True, fp32_gradients=True), id="fp32 gradients"),
        pytest.param(replace(CONVERTED, trained=FROZEN), id="frozen experts"),
        pytest.param(replace(CONVERTED, trained=FROZEN, zero_stage=3, zero_options=SHARDED), id="frozen, ZeRO 3"),
        pytest.param(replace(CONVERTED, model_type="deepseek_v3", mode="two_stage"), id="DeepSeek-V3"),
        pytest.param(replace(CONVERTED, expert_groups=[[0, 3], [1, 2]]), id="named groups"),
    ],
)
def test_other_engines(four_ranks: RankPool, run: Run) -> None:
    for outcome in four_ranks.run(compare_in_own_groups, replace(run, num_steps=SHORT)):
        check(outcome, bf16=run.bf16)


def compare_in_own_groups(run: Run) -> Outcome:
    with other_groups():
        return compare(run)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_eight_ranks(eight_ranks: RankPool, zero_stage: int) -> None:
    run = replace(CONVERTED, zero_stage=zero_stage, zero_options=SHARDED if zero_stage == 3 else {}, ep_size=4)
    for outcome in eight_ranks.run(compare, replace(run, num_steps=SHORT)):
        check(outcome, bf16=False)


@pytest.mark.parametrize(
    ("ep_size", "zero_stage", "bf16"),
    [(2, 0, False), (2, 1, False), (2, 2, False), (2, 0, True), (2, 1, True), (2, 2, True), (4, 1, False)],
)
def test_explicit_layers(four_ranks: RankPool, ep_size: int, zero_stage: int, bf16: bool) -> None:
    setup = replace(EXPLICIT, zero_stage=zero_stage, ep_size=ep_size, bf16=bf16)
    for outcome in four_ranks.run(compare, setup):
        check(outcome, bf16=bf16)


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("lost", ["weights", "master", "exp_avg", "exp_avg_sq"])
def test_what_is_left_behind_shows(four_ranks: RankPool, lost: str, zero_stage: int) -> None:
    """The control: each kind of state is needed, and a move that forgets it is caught."""
    run = replace(CONVERTED, zero_stage=zero_stage, zero_options=SHARDED if zero_stage == 3 else {}, bf16=True)
    for outcome in four_ranks.run(compare_without, run, lost):
        assert outcome.wrong > 0


def check(outcome: Outcome, *, bf16: bool) -> None:
    assert outcome.wrong == 0
    assert outcome.num_moved > 0
    assert outcome.loss_error <= (2e-2 if bf16 else 1e-6)
    assert outcome.bytes_off == 0
    assert outcome.bytes_too_many <= 0


def compare_without(run: Run, lost: str) -> Outcome:
    with forgotten(lost):
        return compare(replace(run, num_steps=SHORT))


@contextmanager
def forgotten(lost: str) -> Iterator[None]:
    whole = StateFinder.fragments

    def all_but_one(finder: StateFinder, parameter: Tensor) -> dict[str, Fragment]:
        return {name: fragment for name, fragment in whole(finder, parameter).items() if name != lost}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateFinder, "fragments", all_but_one)
        yield


def compare(run: Run | explicit.Setup) -> Outcome:
    num_steps = NUM_STEPS if run.num_steps in (Run.num_steps, explicit.Setup.num_steps) else run.num_steps
    straight = train(run, num_steps, lambda engine, step: None)
    moves: list[tuple[int, Any]] = []
    sizes: list[int] = []

    def move(engine: Any, step: int) -> None:
        if step % EVERY:
            return
        before = expert_states(engine)
        report = engine.move_experts(random_placements(engine, seed=step))
        wrong = different(before, expert_states(engine))
        sizes.append(largest_expert(before))
        moves.append((wrong, report))

    moved = train(run, num_steps, move)
    reports = [report for _, report in moves]
    return Outcome(
        wrong=sum(wrong for wrong, _ in moves),
        num_moved=sum(report.num_moved for report in reports),
        loss_error=max(abs(one - other) for one, other in zip(straight, moved, strict=True)),
        bytes_off=max(abs(report.bytes_sent - report.bytes_predicted) for report in reports),
        bytes_too_many=max(
            report.bytes_staged - 2 * size - (CHECK_BYTES + 8) * dist.get_world_size()
            for report, size in zip(reports, sizes, strict=True)
        ),
    )


def train(run: Run | explicit.Setup, num_steps: int, between: Callable[[Any, int], None]) -> list[float]:
    engine = make_engine(run) if isinstance(run, Run) else explicit.make_engine(run, explicit.Toy(run))
    losses = losses_of(engine, run, num_steps, between)
    engine.destroy()
    return losses


def losses_of(
    engine: Any,
    run: Run | explicit.Setup,
    num_steps: int,
    between: Callable[[Any, int], None] = lambda engine, step: None,
) -> list[float]:
    """The mean loss of all ranks at every step; ``between`` gets the engine and how many steps it has done."""
    losses = []
    for step in range(num_steps):
        total = torch.zeros(())
        for micro in range(run.accumulation):
            loss = loss_of(engine, run, step, micro)
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / run.accumulation
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
        between(engine, step + 1)
    return losses


def loss_of(engine: Any, run: Run | explicit.Setup, step: int, micro: int) -> Tensor:
    if isinstance(run, Run):
        ids = batch(step, dist.get_rank() // run.tp_size, micro)
        loss: Tensor = engine(input_ids=ids, labels=ids).loss
        return loss
    tokens = explicit.batch(run, step, dist.get_rank(), micro)
    return explicit.loss_of(run, engine(tokens.bfloat16() if run.bf16 else tokens))


def random_placements(engine: Any, *, seed: int) -> dict[str, ExpertPlacement]:
    """Another one for each layer, equal on all ranks."""
    generator = np.random.default_rng(seed)
    return {
        name: ExpertPlacement.from_slots(generator.permutation(layer.num_experts).reshape(layer.ep_size, -1))
        for name, layer in engine.moe_layers_by_name().items()
    }


def different(one: States, other: States) -> int:
    assert one.keys() == other.keys()
    return sum(not torch.equal(value, other[key]) for key, value in one.items())


def largest_expert(states: States) -> int:
    """Bytes of the largest expert's whole state."""
    sizes: dict[tuple[str, int], int] = {}
    for (layer, expert, _, _), value in states.items():
        sizes[layer, expert] = sizes.get((layer, expert), 0) + value.numel() * value.element_size()
    return max(sizes.values())
