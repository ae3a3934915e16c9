"""Known faults of MoE training that converted layers must not show; explicit ones are tested beside their training."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hybrid.dispatch.modes import MODES, Mode
from tests.multirank.test_presets import LOSS_TOLERANCE, NORM_TOLERANCE, PARAMETER_TOLERANCE
from tests.multirank.test_zero3 import EVERY_PARAMETER
from tests.multirank.training import (
    Run,
    batch,
    gather_parameters,
    initial_parameters,
    largest_difference,
    make_engine,
    train_hybrid,
    train_plain,
    worst_parameter,
)
from tests.ranks import RankPool

STAGES = pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
ROUTERS, EXPERTS, REST = (".mlp.gate.",), (".mlp.experts.",), ("embed_tokens", "self_attn", "norm", "lm_head")


@STAGES
@pytest.mark.parametrize("mode", MODES)
def test_overflow_of_one_expert_stops_all_ranks(two_ranks: RankPool, mode: Mode, zero_stage: int) -> None:
    """G4, in bf16: an infinite gradient of one expert on rank 1, after a step that changes every rank."""
    run = Run(mode=mode, bf16=True, zero_stage=zero_stage, zero_options=EVERY_PARAMETER)
    for skipped, first_changed, second_changed in two_ranks.run(overflow_in_the_second_step, run):
        assert first_changed
        assert not second_changed
        assert skipped == 1


@STAGES
@pytest.mark.parametrize("trained", [ROUTERS, EXPERTS, ROUTERS + REST], ids=["routers", "experts", "all but experts"])
@pytest.mark.parametrize("hand_over", ["all", "trained"])
def test_the_rest_is_frozen(
    two_ranks: RankPool, hand_over: Literal["all", "trained"], trained: tuple[str, ...], zero_stage: int
) -> None:
    """P4: frozen tensors stay bit for bit, the others train like those of the plain model."""
    run = Run(
        zero_stage=zero_stage,
        zero_options=EVERY_PARAMETER,
        trained=trained,
        hand_over=hand_over,
        num_steps=3,
        clip=0.5,
    )
    for parameter_error, loss_error, norm_error, moved in two_ranks.run(compare_part, run):
        assert parameter_error <= PARAMETER_TOLERANCE
        assert loss_error <= LOSS_TOLERANCE
        assert norm_error <= NORM_TOLERANCE
        assert moved == sorted(name for name in initial_parameters(run) if any(part in name for part in trained))


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non_reentrant"])
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_equal_tokens_are_recomputed_as_they_were(
    two_ranks: RankPool, mode: Mode, num_chunks: int, use_reentrant: bool
) -> None:
    """A1: every expert ties with every other for every token."""
    for differing, largest in two_ranks.run(effect_of_recomputation_on_ties, mode, num_chunks, use_reentrant):
        assert differing == []
        assert largest > 0


def overflow_in_the_second_step(run: Run) -> tuple[int, bool, bool]:
    """Skipped steps, and whether the first and the second step changed any parameter."""
    engine = make_engine(run)
    layer = next(iter(engine.moe_layers_by_name().values()))
    seen = [gather_parameters(engine.module)]
    for step in range(2):
        if step == 1 and dist.get_rank() == 1:
            layer.experts.w2.register_hook(_infinite_in_one_expert)
        ids = batch(step, dist.get_rank())
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        seen.append(gather_parameters(engine.module))
    skipped = engine.skipped_steps
    engine.destroy()
    return skipped, _differ(seen[0], seen[1]), _differ(seen[1], seen[2])


def _infinite_in_one_expert(gradient: Tensor) -> Tensor:
    spoilt = gradient.clone()
    spoilt[1] = torch.inf
    return spoilt


def _differ(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return any(not torch.equal(first[name], second[name]) for name in first)


def compare_part(run: Run) -> tuple[float, float, float, list[str]]:
    """The errors of parameters, losses and norms, and the names of what moved."""
    trained, reference, initial = train_hybrid(run), train_plain(run, dist.get_world_size()), initial_parameters(run)
    error, _ = worst_parameter(trained, reference, initial)
    moved = sorted(name for name, value in trained.parameters.items() if not torch.equal(value, initial[name]))
    return (
        error,
        largest_difference(trained.losses, reference.losses),
        largest_difference(trained.norms, reference.norms),
        moved,
    )


def effect_of_recomputation_on_ties(mode: Mode, num_chunks: int, use_reentrant: bool) -> tuple[list[str], float]:
    """Which gradients differ from those of a training that keeps everything, and the largest of all."""
    gradients = []
    for checkpointing in (None, use_reentrant):
        run = Run(mode=mode, zero_stage=0, overlap_chunks=num_chunks, checkpointing=checkpointing)
        gradients.append(_gradients_of_ties(make_engine(run)))
    plain, recomputed = gradients
    differing = [name for name in plain if not torch.equal(plain[name], recomputed[name])]
    return differing, max(float(gradient.abs().max()) for gradient in plain.values())


def _gradients_of_ties(engine: Any) -> dict[str, Tensor]:
    for layer in engine.moe_layers_by_name().values():
        torch.nn.init.zeros_(layer.router.gate.weight)
    ids = torch.full((2, 12), 5 + dist.get_rank())
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in engine.module.named_parameters()
        if parameter.grad is not None
    }
    assert gradients
    engine.destroy()
    return gradients
