"""Parameter groups are split into dense parts and experts, with options, order and learning rates kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import LRRangeTest, WarmupCosineLR, WarmupLR
from torch import nn
from torch.optim import lr_scheduler

from ds_hybrid.engine.parameter_groups import split_groups, split_optimizer


def parameter(group_name: str | None = None, *, trainable: bool = True) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(2), requires_grad=trainable)
    if group_name is not None:
        made.allreduce, made.group_name = False, group_name  # type: ignore[attr-defined]
    return made


def summary(groups: list[dict[str, Any]]) -> list[tuple[str, bool, int]]:
    return [(group["name"], group.get("moe", False), len(group["params"])) for group in groups]


def test_a_list_of_parameters() -> None:
    split = split_groups(
        [parameter(), parameter("ep_size_2"), parameter(), parameter("ep_size_4")], trainable_only=False
    )
    assert sorted(summary(split.groups)) == [("ep_size_2", True, 1), ("ep_size_4", True, 1), ("group0", False, 2)]
    assert split.origins == [0, 0, 0]


def test_groups_without_a_name_keep_their_options() -> None:
    """P3."""
    given = [
        {"params": [parameter(), parameter("ep_size_2")], "weight_decay": 0.1},
        {"params": parameter("ep_size_2"), "weight_decay": 0.0},
        {"params": iter([parameter()]), "weight_decay": 0.2},
    ]
    split = split_groups(given, trainable_only=False)
    assert summary(split.groups) == [
        ("group0", False, 1),
        ("group2", False, 1),
        ("ep_size_2", True, 1),
        ("ep_size_2", True, 1),
    ]
    assert [group["weight_decay"] for group in split.groups] == [0.1, 0.2, 0.1, 0.0]
    assert split.origins == [0, 2, 0, 1]


def test_equal_names_do_not_merge_groups() -> None:
    given = [{"params": [parameter("ep_size_2")], "name": "a", "lr": lr} for lr in (1.0, 2.0)]
    split = split_groups(given, trainable_only=False)
    assert [group["lr"] for group in split.groups] == [1.0, 2.0]


def test_split_groups_stay() -> None:
    once = split_groups([parameter(), parameter("ep_size_2")], trainable_only=False)
    twice = split_groups(once.groups, trainable_only=False)
    assert summary(twice.groups) == summary(once.groups)
    assert twice.origins == [0, 1]


def test_groups_without_anything_to_train_are_left_out_on_request() -> None:
    """P4."""
    given = [parameter(), parameter("ep_size_2", trainable=False)]
    assert summary(split_groups(given, trainable_only=True).groups) == [("group0", False, 1)]
    assert len(split_groups(given, trainable_only=False).groups) == 2


@pytest.mark.parametrize("nested", [False, True])
def test_a_scheduler_follows_the_groups(nested: bool) -> None:
    dense, expert, other = parameter(), parameter("ep_size_2"), parameter("ep_size_2")
    optimizer = torch.optim.SGD([{"params": [dense, expert], "lr": 1.0}, {"params": [other], "lr": 0.1}])
    scheduler: Any = lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.1**step])
    if nested:
        scheduler = lr_scheduler.SequentialLR(optimizer, [scheduler], milestones=[])
    split_optimizer(optimizer, scheduler, trainable_only=False)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert [rates[id(p)] for p in (dense, expert, other)] == pytest.approx([0.25, 0.25, 0.001])
    assert scheduler.get_last_lr() == pytest.approx([group["lr"] for group in optimizer.param_groups])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (WarmupLR, {"warmup_min_lr": [0.0, 0.0], "warmup_max_lr": [1.0, 0.1], "warmup_num_steps": 4}),
        (WarmupCosineLR, {"total_num_steps": 8, "warmup_num_steps": 4}),
        (LRRangeTest, {"lr_range_test_min_lr": [1.0, 0.1], "lr_range_test_step_size": 2}),
    ],
)
def test_a_scheduler_of_deepspeeds_follows_the_groups(kind: Any, options: dict[str, Any]) -> None:
    """The parts have the rates of a run whose groups are not split."""

    def rates(*, split: bool) -> list[list[float]]:
        dense, expert, other = parameter(), parameter("ep_size_2"), parameter("ep_size_2")
        optimizer = torch.optim.SGD([{"params": [dense, expert], "lr": 1.0}, {"params": [other], "lr": 0.1}])
        scheduler = kind(optimizer, **options)
        if split:
            assert split_optimizer(optimizer, scheduler, trainable_only=False) == [0, 0, 1]
        found = []
        for _ in range(3):
            scheduler.step()
            rate_of = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
            found.append([rate_of[id(p)] for p in (dense, expert, other)])
        return found

    expected = rates(split=False)
    assert expected[0] != expected[2]
    assert rates(split=True) == expected
