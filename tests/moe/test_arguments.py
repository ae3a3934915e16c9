"""Every broken rule of ``ds_hybrid.MoE``'s arguments, in one error."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import ds_hybrid
from ds_hybrid import ConfigError
from ds_hybrid.config import DispatchConfig
from ds_hybrid.moe.arguments import check_dispatch, check_world_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts": 0}, "ds_hybrid.MoE(num_experts=0): must be at least 1."),
        ({"k": 5}, "ds_hybrid.MoE(k=5): must be from 1 to num_experts = 4."),
        ({"k": 0}, "ds_hybrid.MoE(k=0): must be from 1 to num_experts = 4."),
        ({"ep_size": 3}, "ds_hybrid.MoE(ep_size=3): must divide num_experts = 4. Values that work: 1, 2, 4."),
        (
            {"use_tutel": True},
            "ds_hybrid.MoE(use_tutel=True): not supported: Tutel's kernels serve DeepSpeed's own dispatch. "
            "Leave it False: dispatch= chooses ours.",
        ),
        (
            {"enable_expert_tensor_parallelism": True},
            "ds_hybrid.MoE(enable_expert_tensor_parallelism=True): not supported: experts are not split over "
            "tensor-parallel ranks. Leave it False.",
        ),
        (
            {"noisy_gate_policy": "RSampel"},
            'ds_hybrid.MoE(noisy_gate_policy=\'RSampel\'): must be null, "None", "Jitter" or "RSample". '
            'Did you mean "RSample"?',
        ),
        (
            {"drop_policy": "probabilty"},
            'ds_hybrid.MoE(drop_policy=\'probabilty\'): must be "probability", "position" or "random". '
            'Did you mean "probability"?',
        ),
        (
            {"noisy_gate_policy": "Jitter", "top2_2nd_expert_sampling": True},
            "ds_hybrid.MoE(noisy_gate_policy='Jitter'): does not combine with top2_2nd_expert_sampling=True. "
            "Choose one of them.",
        ),
        ({"score": "tanh"}, 'ds_hybrid.MoE(score=\'tanh\'): must be "softmax" or "sigmoid".'),
        ({"capacity_factor": 0.0}, "ds_hybrid.MoE(capacity_factor=0.0): must be above 0."),
        ({"z_loss_weight": -1.0}, "ds_hybrid.MoE(z_loss_weight=-1.0): must not be negative."),
        ({"num_groups": 3}, "ds_hybrid.MoE(num_groups=3): must divide num_experts = 4. Values that work: 1, 2, 4."),
        (
            {"num_groups": 2, "topk_groups": 3},
            "ds_hybrid.MoE(topk_groups=3): must be from 1 to num_groups = 2.",
        ),
        (
            {"num_groups": 4, "topk_groups": 1, "k": 2},
            "ds_hybrid.MoE(topk_groups=1): 1 groups hold 1 experts, fewer than k = 2. Raise it or lower k.",
        ),
    ],
)
def test_one_broken_rule(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ds_hybrid.MoE(8, nn.Linear(8, 8), **{"num_experts": 4, **arguments})
    assert str(raised.value) == message


def test_an_unknown_dispatcher_gets_the_right_name() -> None:
    with pytest.raises(ConfigError, match=r'^ds_hybrid.MoE\(dispatch=\'two_stages\'\): .* Did you mean "two_stage"\?$'):
        ds_hybrid.MoE(8, nn.Linear(8, 8), 4, dispatch="two_stages")  # type: ignore[arg-type]


def test_all_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        ds_hybrid.MoE(8, nn.Linear(8, 8), 4, ep_size=3, k=9, use_tutel=True, min_capacity=-1)
    assert len(raised.value.problems) == 4


def test_world_size() -> None:
    check_world_size(4, num_experts=8, ep_size=2)
    with pytest.raises(ConfigError) as raised:
        check_world_size(6, num_experts=4, ep_size=4)
    assert str(raised.value) == (
        "ds_hybrid.MoE(ep_size=4): must divide the world size 6 and num_experts = 4. Values that work: 1, 2."
    )


def test_dispatch_section() -> None:
    check_dispatch(DispatchConfig(mode="allgather", guard=False), layer="moe")
    with pytest.raises(ConfigError) as raised:
        check_dispatch(DispatchConfig(mode="replicated"), layer="moe")
    assert str(raised.value) == (
        "ds_hybrid.dispatch.mode = \"replicated\": not available for the ds_hybrid.MoE 'moe'. "
        'Set it to "auto", "alltoall", "allgather", "two_stage" or "hierarchical".'
    )
