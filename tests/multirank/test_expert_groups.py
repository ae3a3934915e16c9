"""Expert groups that the links put together, or that the ds_config names, train like the plain model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

import ds_hybrid
from ds_hybrid.errors import ConfigError, HybridError
from ds_hybrid.topology import probe
from tests.multirank import explicit
from tests.multirank.test_presets import (
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    PARAMETER_TOLERANCE,
    Comparison,
    compare_with_plain,
)
from tests.multirank.training import (
    PLANS,
    Run,
    train_hybrid,
)
from tests.ranks import RankPool

Groups = list[list[int]]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("groups", [[[0, 2], [1, 3]], [[0, 3], [1, 2]]], ids=str)
def test_named_groups_train_like_the_plain_model(four_ranks: RankPool, groups: Groups, zero_stage: int) -> None:
    run = Run(zero_stage=zero_stage, clip=0.5, num_steps=5)
    for found, result in four_ranks.run(compare, run, groups, [0, 0, 0, 0]):
        assert found == groups
        assert result.loss_error <= LOSS_TOLERANCE, result
        assert result.parameter_error <= PARAMETER_TOLERANCE, result
        assert result.norm_error <= NORM_TOLERANCE, result


@pytest.mark.parametrize(
    ("host_of_rank", "expected"),
    [
        ([0, 0, 0, 0], [[0, 1], [2, 3]]),
        ([0, 1, 0, 1], [[0, 2], [1, 3]]),
        ([0, 1, 1, 0], [[0, 3], [1, 2]]),
    ],
)
def test_groups_stay_on_their_hosts(four_ranks: RankPool, host_of_rank: list[int], expected: Groups) -> None:
    for found, result in four_ranks.run(compare, Run(num_steps=3), "auto", host_of_rank):
        assert found == expected
        assert result.loss_error <= LOSS_TOLERANCE, result
        assert result.parameter_error <= PARAMETER_TOLERANCE, result


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("groups", [[[0, 2], [1, 3]], [[0, 3], [1, 2]]], ids=str)
def test_explicit_experts_travel_to_the_ranks_that_hold_them(
    four_ranks: RankPool, groups: Groups, zero_stage: int
) -> None:
    """They are built for consecutive groups. Their values are the caller's by then, not those of the seed."""
    setup = explicit.Setup(zero_stage=zero_stage, clip=0.05, lengths=(6, 1, 9, 4))
    for error, norm_error in four_ranks.run(errors_of_explicit, setup, groups):
        assert error <= 1e-5
        assert norm_error <= 1e-5


def test_a_process_keeps_its_groups(four_ranks: RankPool) -> None:
    message = (
        "ds_hybrid.topology.expert_groups = [[0, 2], [1, 3]]: this process has the expert-parallel group "
        "{} from an engine before. Start a new process for other groups."
    )
    theirs = [[0, 1], [0, 1], [2, 3], [2, 3]]
    lines = [f"rank {rank}: {message.format(group)}" for rank, group in enumerate(theirs)]
    assert four_ranks.run(message_of_other_groups) == ["\n".join(lines)] * 4


NOT_OURS = (
    "ds_hybrid.topology.expert_groups = [[0, 2], [1, 3]]: not available with tensor or sequence parallelism, an mpu or "
    'a mesh: DeepSpeed makes the groups then. Set it to "auto".'
)
ONE_SIZE = (
    "ds_hybrid.topology.expert_groups = [[0, 2], [1, 3]]: needs experts in groups of one size above 1, the model has "
    '{}. Set it to "auto".'
)


@pytest.mark.parametrize(
    ("ep_sizes", "changes", "message"),
    [
        ([], {"expert_parallel": {"enabled": False}}, ONE_SIZE.format("none")),
        ([2, 4], {"expert_parallel": {"enabled": False}}, ONE_SIZE.format("2, 4")),
        ([2], {"expert_parallel": {"enabled": False}, "sequence_parallel_size": 2}, NOT_OURS),
        ([], {"tensor_parallel": PLANS["a"]["tensor_parallel"] | {"autotp_size": 2}}, NOT_OURS),
    ],
    ids=["no experts", "two sizes", "sequence parallel", "tensor parallel"],
)
def test_groups_that_cannot_be_made_are_refused(
    four_ranks: RankPool, ep_sizes: list[int], changes: dict[str, Any], message: str
) -> None:
    assert four_ranks.run(message_of, ep_sizes, changes) == [message] * 4


def test_ranks_with_models_of_other_sizes_raise_alike(four_ranks: RankPool) -> None:
    message = (
        "the sizes of expert-parallel groups: ranks 0 and 3 differ: 2 and 4. Give every host the same ds_config and "
        "the same model."
    )
    assert four_ranks.run(message_of_unlike_models, limit=60) == [message] * 4


def test_the_groups_of_the_article_on_eight_ranks(eight_ranks: RankPool) -> None:
    groups = [[0, 1, 4, 5], [2, 3, 6, 7]]
    for zero_stage in (1, 3):
        run = Run(zero_stage=zero_stage, ep_size=4, clip=0.1, num_steps=3)
        for found, result in eight_ranks.run(compare, run, groups, [0] * 8):
            assert found == groups
            assert result.loss_error <= LOSS_TOLERANCE, result
            assert result.parameter_error <= PARAMETER_TOLERANCE, result
            assert result.norm_error <= NORM_TOLERANCE, result


@pytest.fixture
def eight_ranks() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


def compare(run: Run, groups: Groups | str, host_of_rank: list[int]) -> tuple[Groups, Comparison]:
    found: list[Groups] = []

    def note(engine: Any) -> None:
        lists: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lists, deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS[f"ep_size_{run.ep_size}"])
        found.append([list(ranks) for ranks in sorted({tuple(ranks) for ranks in lists})])

    with other_groups(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "key_of_this_host", lambda: f"host {host_of_rank[dist.get_rank()]}")
        trained = train_hybrid(replace(run, expert_groups=groups), note)
    return found[0], compare_with_plain(trained, run)


@contextmanager
def other_groups() -> Iterator[None]:
    """As in a process that has made no expert groups; those of before are put back."""
    tables = (
        deepspeed_groups._EXPERT_PARALLEL_GROUP,
        deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS,
        deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP,
        deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
    )
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)


def errors_of_explicit(setup: explicit.Setup, groups: Groups) -> tuple[float, float]:
    def shift(toy: nn.Module) -> None:
        """As after loading values: each expert differs from what its seed gives."""
        with torch.no_grad():
            for parameter in toy.moe.deepspeed_moe.experts.parameters():  # type: ignore[union-attr]
                parameter.mul_(0.5).add_(0.01)

    reference = explicit.train_reference(setup, dist.get_world_size(), prepare=shift)
    toy = explicit.Toy(setup)
    shift(toy)
    with other_groups():
        config = setup.ds_config()
        config["ds_hybrid"]["topology"] = {"expert_groups": groups}
        engine, *_ = ds_hybrid.initialize(model=toy, model_parameters=toy.parameters(), config=config)
        place = dist.get_rank(toy.moe.dispatcher.group.process_group)
        trained = explicit.train(engine, setup, place=place)
    initial = explicit.initial_parameters(setup)
    norm = max(abs(a - b) for a, b in zip(trained.norms, reference.norms, strict=True)) if setup.zero_stage else 0.0
    return explicit.worst_error(trained, reference, initial), norm


def message_of_other_groups() -> str:
    with other_groups():
        run = Run(num_steps=1, expert_groups=[[0, 1], [2, 3]])
        train_hybrid(run)
        with pytest.raises(ConfigError) as error:
            train_hybrid(replace(run, expert_groups=[[0, 2], [1, 3]]))
    return str(error.value)


def message_of(ep_sizes: list[int], changes: dict[str, Any]) -> str:
    model = nn.ModuleList(
        [ds_hybrid.MoE(4, nn.Linear(4, 4), 4, ep_size=size) for size in ep_sizes] or [nn.Linear(4, 4)]
    )
    config = {**Run().ds_config(), **changes}
    config["ds_hybrid"]["topology"] = {"expert_groups": [[0, 2], [1, 3]]}
    with pytest.raises(HybridError) as error:
        ds_hybrid.initialize(model=model, model_parameters=model.parameters(), config=config)
    return str(error.value)


def message_of_unlike_models() -> str:
    model = ds_hybrid.MoE(4, nn.Linear(4, 4), 4, ep_size=4 if dist.get_rank() == 3 else 2)
    config = {**Run().ds_config(), "expert_parallel": {"enabled": False}}
    with pytest.raises(HybridError) as error:
        ds_hybrid.initialize(model=model, model_parameters=model.parameters(), config=config)
    return str(error.value)
