"""ZeRO-3, every parameter partitioned: each dispatcher, in chunks and recomputed, trains like the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ds_hybrid.dispatch.modes import Mode
from tests.multirank.test_presets import assert_equal
from tests.multirank.training import Run, batch, make_engine
from tests.ranks import RankPool

RECOMPUTATION = {"plain": None, "reentrant": True, "non_reentrant": False}
EVERY_PARAMETER = {"stage3_param_persistence_threshold": 0}
"""By default DeepSpeed leaves parameters of under 100 000 values whole, which here are all of them."""

CASES: list[tuple[Mode, int, str]] = [
    ("alltoall", 3, "plain"),
    ("alltoall", 1, "reentrant"),
    ("alltoall", 3, "non_reentrant"),
    ("allgather", 1, "plain"),
    ("allgather", 3, "reentrant"),
    ("allgather", 1, "non_reentrant"),
    ("two_stage", 1, "plain"),
    ("two_stage", 3, "reentrant"),
    ("two_stage", 1, "non_reentrant"),
]
"""Any two of mode, chunks and recomputation meet in some case."""


def run_of(mode: Mode, num_chunks: int, recomputation: str) -> Run:
    return Run(
        mode=mode,
        overlap_chunks=num_chunks,
        checkpointing=RECOMPUTATION[recomputation],
        zero_stage=3,
        zero_options=EVERY_PARAMETER,
        num_steps=3,
        clip=0.5,
    )


@pytest.mark.parametrize(("mode", "num_chunks", "recomputation"), CASES)
def test_trains_like_the_plain_model(four_ranks: RankPool, mode: Mode, num_chunks: int, recomputation: str) -> None:
    assert_equal(four_ranks, run_of(mode, num_chunks, recomputation))


@pytest.mark.parametrize(
    ("mode", "num_chunks", "recomputation"),
    [("two_stage", 1, "plain"), ("alltoall", 3, "reentrant"), ("allgather", 2, "non_reentrant")],
)
def test_experts_are_whole_while_they_work_and_given_back_after(
    four_ranks: RankPool, mode: Mode, num_chunks: int, recomputation: str
) -> None:
    for at_work, afterwards in four_ranks.run(statuses_of_experts, run_of(mode, num_chunks, recomputation)):
        num_forwards = 1 if recomputation == "plain" else 2
        assert at_work == ["AVAILABLE"] * 3 * 2 * num_chunks * num_forwards
        assert afterwards == ["NOT_AVAILABLE"] * 3 * 2


def statuses_of_experts(run: Run) -> tuple[list[str], list[str]]:
    """Of w1, w2 and w3 of both layers: in each call of the experts, and after the backward."""
    engine = make_engine(run)
    at_work: list[str] = []
    of_layers = [layer.experts for layer in engine.moe_layers_by_name().values()]
    for experts in of_layers:

        def noted(*arguments: Any, experts: Any = experts, forward: Any = experts.forward) -> Any:
            at_work.extend(_statuses(experts))
            return forward(*arguments)

        experts.forward = noted
    ids = batch(0, dist.get_rank())
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    afterwards = [status for experts in of_layers for status in _statuses(experts)]
    engine.destroy()
    return at_work, afterwards


def _statuses(experts: Any) -> list[str]:
    return [ZeroParamStatus(parameter.ds_status).name for parameter in experts.parameters()]
