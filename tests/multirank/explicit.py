"""Short trainings of a model with a ``ds_hybrid.MoE``: through ds_hybrid on the calling ranks, and on one process.

The reference computes the layer token by token, and trains on all ranks' batches with the mean of the ranks' losses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_hybrid
from tests.moe.reference import dense_moe
from tests.multirank.training import ADAM

HIDDEN, EXPERTS = 8, 4


@dataclass(frozen=True)
class Setup:
    """One training: what varies between the compared ones. ``aux`` is the factor of the auxiliary loss."""

    ep_size: int = 2
    k: int = 2
    zero_stage: int = 1
    zero_options: dict[str, Any] = field(default_factory=dict)
    clip: float = 0.0
    accumulation: int = 1
    num_steps: int = 3
    aux: float = 0.1
    learning_rate: float = 0.3
    bf16: bool = False
    adam: bool = False
    """Else SGD."""
    lengths: tuple[int, ...] = (6, 6, 6, 6)
    """Tokens of each rank; they shift by one rank at every step."""
    options: dict[str, Any] = field(default_factory=dict)
    dispatch: dict[str, Any] = field(default_factory=dict)
    """Of the ds_config."""
    checkpointing: bool | Literal["deepspeed"] | None = None
    """None: off; a bool: torch's, the value of use_reentrant; "deepspeed": DeepSpeed's."""

    def ds_config(self, *, optimizer: bool = True) -> dict[str, Any]:
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.zero_stage, **self.zero_options},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.bf16},
            "steps_per_print": 1000000,
            "ds_hybrid": {"dispatch": {"mode": "two_stage", **self.dispatch}},
        }
        if optimizer:
            config["optimizer"] = ADAM if self.adam else {"type": "SGD", "params": {"lr": self.learning_rate}}
        return config


class Toy(nn.Module):
    """Linear -> MoE -> Linear; the values of logical expert e do not depend on ``ep_size``."""

    def __init__(self, setup: Setup, ep_size: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = ds_hybrid.MoE(
            HIDDEN,
            lambda: nn.Sequential(nn.Linear(HIDDEN, 6), nn.Tanh(), nn.Linear(6, HIDDEN)),
            EXPERTS,
            ep_size=setup.ep_size if ep_size is None else ep_size,
            k=setup.k,
            seed=1,
            **setup.options,
        )
        nn.init.normal_(self.moe.deepspeed_moe.gate.wg.weight)
        self.checkpointing = setup.checkpointing

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.inp(tokens)
        if self.checkpointing is None:
            hidden, l_aux, _ = self.moe(hidden)
        elif self.checkpointing == "deepspeed":
            hidden, l_aux, _ = deepspeed.checkpointing.checkpoint(self.moe, hidden)
        else:
            hidden, l_aux, _ = checkpoint(self.moe, hidden, use_reentrant=self.checkpointing)
        return self.out(hidden), l_aux


def reference_forward(toy: Toy, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The toy, its MoE layer token by token."""
    gate, experts = toy.moe.deepspeed_moe.gate, list(toy.moe.deepspeed_moe.experts.deepspeed_experts)
    routed = dense_moe(toy.inp(tokens), gate.wg.weight, experts, gate.options)
    return toy.out(routed.output), routed.l_aux


def batch(setup: Setup, step: int, rank: int, micro: int) -> Tensor:
    """[T, H], different for every step, rank and micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(setup.lengths[(rank + step) % len(setup.lengths)], HIDDEN, generator=generator)


def loss_of(setup: Setup, result: tuple[Tensor, Tensor]) -> Tensor:
    output, l_aux = result
    return output.float().square().sum() / HIDDEN + setup.aux * l_aux


@dataclass(frozen=True)
class Outcome:
    """Parameters by the whole model's names (on a rank: those it holds), and the gradient norm of each step."""

    parameters: dict[str, Tensor]
    norms: list[float]


def train_reference(setup: Setup, num_ranks: int, prepare: Callable[[Toy], Any] | None = None) -> Outcome:
    toy = Toy(setup, ep_size=1)
    if prepare is not None:
        prepare(toy)
    optimizer = torch.optim.SGD(toy.parameters(), lr=setup.learning_rate)
    norms = []
    for step in range(setup.num_steps):
        optimizer.zero_grad()
        parts = [(rank, micro) for rank in range(num_ranks) for micro in range(setup.accumulation)]
        for rank, micro in parts:
            loss = loss_of(setup, reference_forward(toy, batch(setup, step, rank, micro)))
            (loss / len(parts)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(toy.parameters(), setup.clip or float("inf"))))
        optimizer.step()
    return Outcome(logical_parameters(toy), norms)


def make_engine(setup: Setup, toy: Toy, **arguments: Any) -> Any:
    """``arguments`` are those of ``ds_hybrid.initialize``."""
    arguments = {"model_parameters": toy.parameters(), **arguments}
    config = setup.ds_config(optimizer="optimizer" not in arguments)
    engine, *_ = ds_hybrid.initialize(model=toy, config=config, **arguments)
    return engine


def train(engine: Any, setup: Setup, *, place: int | None = None) -> Outcome:
    """On the calling ranks; ends the engine. ``place`` is the rank's in its expert-parallel group of other ranks."""
    norms = []
    for step in range(setup.num_steps):
        for micro in range(setup.accumulation):
            tokens = batch(setup, step, dist.get_rank(), micro)
            engine.backward(loss_of(setup, engine(tokens.bfloat16() if setup.bf16 else tokens)))
            engine.step()
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    outcome = Outcome(logical_parameters(engine.module, place=place), norms)
    engine.destroy()
    return outcome


def logical_parameters(toy: nn.Module, *, place: int | None = None) -> dict[str, Tensor]:
    """This rank's parameters by the names they have in the whole model."""
    moe = toy.moe
    assert isinstance(moe, ds_hybrid.MoE)
    first = (dist.get_rank() % moe.ep_size if place is None else place) * moe.num_local_experts

    def whole_name(match: re.Match[str]) -> str:
        return f"deepspeed_experts.{int(match[1]) + first}."

    return {
        re.sub(r"deepspeed_experts\.(\d+)\.", whole_name, name): parameter.detach().clone().float()
        for name, parameter in toy.named_parameters()
    }


def worst_error(trained: Outcome, reference: Outcome, initial: dict[str, Tensor]) -> float:
    """The largest error of a parameter that this rank holds, over the largest change that training made to any."""
    changes = [float((value - initial[name]).abs().max()) for name, value in reference.parameters.items()]
    errors = [float((value - reference.parameters[name]).abs().max()) for name, value in trained.parameters.items()]
    assert all(value.isfinite().all() for value in trained.parameters.values())
    return max(errors) / max(changes)


def initial_parameters(setup: Setup) -> dict[str, Tensor]:
    return logical_parameters(Toy(setup, ep_size=1))
