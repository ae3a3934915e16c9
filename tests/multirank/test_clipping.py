"""Without ZeRO, in fp32, gradients are clipped by the norm of the whole model, experts of all ranks included.

The numbers are those of a known fault: DeepSpeed's own norm makes every expert's step half again too large.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn

from ds_hybrid.engine.clipping import clip_gradients
from tests.ranks import RankPool

NORM = 43.81780460041329
"""Expert j = 0..3 has 64 gradient values of j + 1: sqrt(64 x (1 + 4 + 9 + 16))."""


@pytest.mark.parametrize("ep_size", [1, 2])
def test_norm_and_scale_are_those_of_all_experts(two_ranks: RankPool, ep_size: int) -> None:
    for norm, steps in two_ranks.run(clipped_steps, ep_size, 1.0):
        assert norm == pytest.approx(NORM, rel=1e-6)
        assert steps == pytest.approx({j: (j + 1) / NORM for j in steps}, rel=1e-6)


def test_small_gradients_are_left_alone(two_ranks: RankPool) -> None:
    for norm, steps in two_ranks.run(clipped_steps, 2, 50.0):
        assert norm == pytest.approx(NORM, rel=1e-6)
        assert steps == {j: j + 1.0 for j in steps}


def clipped_steps(ep_size: int, max_norm: float) -> tuple[float, dict[int, float]]:
    """The norm, and the clipped gradient value of each expert of this rank."""
    name = f"ep_size_{ep_size}"
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(ep_size)
    num_local = 4 // ep_size
    first = dist.get_rank() % ep_size * num_local
    experts = {j: nn.Parameter(torch.zeros(8, 8)) for j in range(first, first + num_local)}
    for j, expert in experts.items():
        expert.grad = torch.full((8, 8), j + 1.0)
        expert.allreduce, expert.group_name = False, name  # type: ignore[attr-defined]
    shared, frozen = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    shared.grad = torch.zeros(3)
    norm = clip_gradients([shared, frozen, *experts.values()], max_norm)
    return float(norm), {j: float(e.grad[0, 0]) for j, e in experts.items() if e.grad is not None}
