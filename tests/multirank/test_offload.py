"""P6: ZeRO with the optimizer's states on the CPU trains and clips like one process; converted and explicit layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.multirank import explicit
from tests.multirank.test_moe_training import NORM, TOLERANCE, clipped_steps, errors_of_training
from tests.multirank.test_presets import assert_equal
from tests.multirank.training import Run, make_engine
from tests.ranks import RankPool

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
STAGES = pytest.mark.parametrize("zero_stage", [1, 2])


@STAGES
@pytest.mark.parametrize(
    "run",
    [Run(num_steps=3), Run(num_steps=3, clip=0.5, accumulation=2)],
    ids=["plain", "clipped, two micro-batches"],
)
def test_converted_model_trains_like_the_plain_one(two_ranks: RankPool, run: Run, zero_stage: int) -> None:
    assert_equal(two_ranks, replace(run, zero_stage=zero_stage, zero_options=OFFLOAD))


def test_the_optimizer_is_offloaded(two_ranks: RankPool) -> None:
    """A control: without the option the same code answers no."""
    assert two_ranks.run(is_offloaded, Run(zero_stage=2, zero_options=OFFLOAD)) == [True, True]
    assert two_ranks.run(is_offloaded, Run(zero_stage=2)) == [False, False]


@STAGES
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_explicit_layer_trains_like_one_process(
    two_ranks: RankPool, clip: float, accumulation: int, zero_stage: int
) -> None:
    setup = explicit.Setup(clip=clip, accumulation=accumulation, zero_stage=zero_stage, zero_options=OFFLOAD)
    for error, norm_error in two_ranks.run(errors_of_training, setup):
        assert error <= TOLERANCE
        assert norm_error <= TOLERANCE


@STAGES
@pytest.mark.parametrize("ep_size", [1, 2])
def test_norm_is_that_of_all_experts(two_ranks: RankPool, zero_stage: int, ep_size: int) -> None:
    """G1 with its numbers, as without offload."""
    setup = explicit.Setup(
        zero_stage=zero_stage, zero_options=OFFLOAD, ep_size=ep_size, clip=1.0, learning_rate=1.0, num_steps=1
    )
    for norm, steps in two_ranks.run(clipped_steps, setup):
        assert norm == pytest.approx(NORM, rel=1e-6)
        assert steps == pytest.approx({j: (j + 1) / NORM for j in steps}, rel=1e-5)


def is_offloaded(run: Run) -> bool:
    engine = make_engine(run)
    answer = bool(engine.optimizer.cpu_offload)
    engine.destroy()
    return answer
