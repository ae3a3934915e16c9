"""Whatever parameter groups a user hands over, a model with ``ds_hybrid.MoE`` trains like one process. In fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hybrid
from tests.multirank import training
from tests.multirank.explicit import (
    HIDDEN,
    Outcome,
    Setup,
    Toy,
    initial_parameters,
    logical_parameters,
    make_engine,
    train,
    train_reference,
    worst_error,
)
from tests.multirank.models import make_model
from tests.ranks import RankPool

TOLERANCE = 1e-5
RATE = Setup().learning_rate
STAGES = pytest.mark.parametrize("zero_stage", [0, 1, 2])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def unnamed_groups(toy: Toy) -> list[dict[str, Any]]:
    """What a trainer that exempts biases from weight decay makes."""
    named = list(toy.named_parameters())
    return [
        {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
    ]


WAYS: dict[str, Callable[[Toy], dict[str, Any]]] = {
    "client optimizer": lambda toy: {"optimizer": sgd(toy.parameters())},
    "client optimizer, model_parameters left out": lambda toy: {
        "optimizer": sgd(toy.parameters()),
        "model_parameters": None,
    },
    "client optimizer over unnamed groups": lambda toy: {"optimizer": sgd(unnamed_groups(toy))},
    "client factory": lambda toy: {"optimizer": sgd},
    "unnamed groups": lambda toy: {"model_parameters": unnamed_groups(toy)},
    "one unnamed group": lambda toy: {"model_parameters": [{"params": list(toy.parameters())}]},
    "a generator": lambda toy: {},
}


@STAGES
@pytest.mark.parametrize("way", WAYS)
def test_groups_are_split(two_ranks: RankPool, way: str, zero_stage: int) -> None:
    """P2, P3, P5: equal to one process, and every expert and router tensor moves."""
    for error, unmoved in two_ranks.run(train_by, way, Setup(zero_stage=zero_stage)):
        assert error <= TOLERANCE
        assert unmoved == []


@STAGES
def test_a_scheduler_over_a_client_optimizer_drives_the_experts_too(two_ranks: RankPool, zero_stage: int) -> None:
    """A learning rate of 0 from the second step on: three steps are one."""
    for error in two_ranks.run(train_with_scheduler, Setup(zero_stage=zero_stage)):
        assert error <= TOLERANCE


@STAGES
@pytest.mark.parametrize("trained", [["gate.wg"], ["deepspeed_experts"], ["inp", "out"]], ids=str)
@pytest.mark.parametrize("hand_over", ["all", "trained"])
def test_the_rest_is_frozen(two_ranks: RankPool, trained: list[str], hand_over: str, zero_stage: int) -> None:
    """P4: frozen tensors stay bit for bit, the others train like one process."""
    for error, moved in two_ranks.run(train_part, trained, hand_over, Setup(zero_stage=zero_stage)):
        assert error <= TOLERANCE
        assert moved == []


@STAGES
def test_adapters_inside_experts_are_their_experts_own(four_ranks: RankPool, zero_stage: int) -> None:
    """P1, with two replicas of each expert: only adapters and router train."""
    for error, moved in four_ranks.run(train_adapters, Setup(zero_stage=zero_stage)):
        assert error <= TOLERANCE
        assert moved == []


@STAGES
def test_converted_models_take_a_client_optimizer_too(two_ranks: RankPool, zero_stage: int) -> None:
    """P2, P5 for the AutoEP layer."""
    for error, name in two_ranks.run(train_converted, training.Run("mixtral", zero_stage=zero_stage, num_steps=2)):
        assert error <= 1e-4, name  # of that parameter's own change, which may be small


def test_deepspeeds_own_engine_trains_it_too(two_ranks: RankPool) -> None:
    for error in two_ranks.run(train_with_deepspeed, Setup()):
        assert error <= TOLERANCE


def train_by(way: str, setup: Setup) -> tuple[float, list[str]]:
    toy = Toy(setup)
    trained = train(make_engine(setup, toy, **WAYS[way](toy)), setup)
    initial = initial_parameters(setup)
    unmoved = [name for name, value in trained.parameters.items() if torch.equal(value, initial[name])]
    return worst_error(trained, train_reference(setup, 2), initial), unmoved


def train_with_scheduler(setup: Setup) -> float:
    toy = Toy(setup)
    optimizer = sgd(toy.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
    trained = train(make_engine(setup, toy, optimizer=optimizer, lr_scheduler=scheduler), setup)
    reference = train_reference(Setup(num_steps=1), 2)
    return worst_error(trained, reference, initial_parameters(setup))


def train_part(trained: Sequence[str], hand_over: str, setup: Setup) -> tuple[float, list[str]]:
    """The error, and the names of frozen tensors that moved."""

    def freeze(toy: Toy) -> None:
        for name, parameter in toy.named_parameters():
            parameter.requires_grad_(any(part in name for part in trained))

    toy = Toy(setup)
    freeze(toy)
    parameters = [p for p in toy.parameters() if p.requires_grad or hand_over == "all"]
    outcome = train(make_engine(setup, toy, model_parameters=parameters), setup)
    return compare_part(outcome, train_reference(setup, 2, freeze), initial_parameters(setup), trained)


def compare_part(
    outcome: Outcome, reference: Outcome, initial: dict[str, Tensor], trained: Sequence[str]
) -> tuple[float, list[str]]:
    frozen = [name for name in outcome.parameters if not any(part in name for part in trained)]
    moved = [name for name in frozen if not torch.equal(outcome.parameters[name], initial[name])]
    return worst_error(outcome, reference, initial), moved


class Adapted(nn.Module):
    """An expert with a rank-2 detour beside it, as a user adds after the model is built."""

    def __init__(self, base: nn.Module, expert_id: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(expert_id)
        self.base = base
        self.down = nn.Parameter(torch.randn(HIDDEN, 2, generator=generator))
        self.up = nn.Parameter(torch.randn(2, HIDDEN, generator=generator))

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.base(rows) + rows @ self.down @ self.up
        return output


ADAPTED = (".down", ".up", "gate.wg")


def adapt(toy: Toy) -> None:
    experts = toy.moe.deepspeed_moe.experts.deepspeed_experts
    first = dist.get_rank() % toy.moe.ep_size * len(experts)
    for slot, expert in enumerate(experts):
        experts[slot] = Adapted(expert, first + slot)
    for name, parameter in toy.named_parameters():
        parameter.requires_grad_(name.endswith(ADAPTED[:2]) or ADAPTED[2] in name)


def train_adapters(setup: Setup) -> tuple[float, list[str]]:
    toy = Toy(setup)
    adapt(toy)
    outcome = train(make_engine(setup, toy), setup)
    whole = Toy(setup, ep_size=1)
    adapt(whole)
    return compare_part(outcome, train_reference(setup, 4, adapt), logical_parameters(whole), ADAPTED)


def train_converted(run: training.Run) -> tuple[float, str]:
    model = make_model(run.model_type)
    config = {key: value for key, value in run.ds_config().items() if key != "optimizer"}
    optimizer = torch.optim.SGD(model.parameters(), lr=run.learning_rate)
    engine, *_ = ds_hybrid.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(run.num_steps):
        ids = training.batch(step, dist.get_rank())
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    trained = training.Outcome([], training.gather_parameters(engine.module), [])
    engine.destroy()
    return training.worst_parameter(trained, training.train_plain(run, 2), training.initial_parameters(run))


def train_with_deepspeed(setup: Setup) -> float:
    import deepspeed

    toy = Toy(setup)
    assert isinstance(toy.moe, ds_hybrid.MoE)
    engine, *_ = deepspeed.initialize(model=toy, model_parameters=toy.parameters(), config=setup.ds_config())
    return worst_error(train(engine, setup), train_reference(setup, 2), initial_parameters(setup))
