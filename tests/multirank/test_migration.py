"""A run on ``deepspeed.moe.layer.MoE`` goes on in ``ds_hybrid.MoE``, from the checkpoint that DeepSpeed wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE as DeepSpeedMoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn

import ds_hybrid
from tests.multirank.training import ADAM
from tests.ranks import RankPool

HIDDEN, EXPERTS, STEPS = 8, 4, 6
SIZES: dict[str, Any] = {"num_experts": EXPERTS, "ep_size": 2, "k": 2}


class Net(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.first, self.moe, self.last = nn.Linear(HIDDEN, HIDDEN), moe, nn.Linear(HIDDEN, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.moe(self.first(tokens))[0])


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 16), nn.ReLU(), nn.Linear(16, HIDDEN))


def losses_of(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = engine(torch.randn(4, HIDDEN, generator=generator)).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def straight_and_resumed(folder: str, zero_stage: int) -> tuple[list[float], list[float]]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": ADAM,
        "zero_optimization": {"stage": zero_stage},
        "steps_per_print": 1000000,
        "ds_hybrid": {"dispatch": {"mode": "two_stage"}},
    }
    torch.manual_seed(0)
    random = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
    theirs = Net(DeepSpeedMoE(HIDDEN, expert(), **SIZES, **random))
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(theirs.parameters()), "name": "all"})
    stock = {key: value for key, value in config.items() if key != "ds_hybrid"}
    engine, *_ = deepspeed.initialize(model=theirs, model_parameters=groups, config=stock)
    losses_of(engine, 0, STEPS // 2)
    engine.save_checkpoint(folder)
    straight = losses_of(engine, STEPS // 2, STEPS)
    engine.destroy()

    torch.manual_seed(1)
    ours = Net(ds_hybrid.MoE(HIDDEN, expert, **SIZES))
    engine, *_ = ds_hybrid.initialize(model=ours, model_parameters=ours.parameters(), config=config)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    resumed = losses_of(engine, STEPS // 2, STEPS)
    engine.destroy()
    return straight, resumed


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_checkpoint_of_deepspeeds_layer_is_resumed(two_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    for straight, resumed in two_ranks.run(straight_and_resumed, str(tmp_path), zero_stage):
        assert resumed == pytest.approx(straight, rel=1e-5)
        assert straight[-1] != pytest.approx(straight[0], rel=0.05)  # a model that stood still would show nothing
