"""``ds_hybrid.initialize`` takes and returns what ``deepspeed.initialize`` does, and says what it does not take."""

from __future__ import annotations

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import engine as deepspeed_engine
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.data import TensorDataset

import ds_hybrid
from ds_hybrid import ConfigError, HybridAutoEPLayer, MoEEngine
from tests.multirank.models import make_model
from tests.multirank.training import Run
from tests.ranks import RankPool

RELEASE = f"ds_hybrid {ds_hybrid.__version__}"


def test_result_is_deepspeeds_tuple(two_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(Run().ds_config()))
    for kinds in two_ranks.run(kinds_of_result, str(path)):
        assert kinds == ["MoEEngine", "DeepSpeedZeroOptimizer", "DeepSpeedDataLoader", "LambdaLR"]


def test_a_dense_model_is_clipped_by_deepspeeds_own_code(two_ranks: RankPool) -> None:
    for calls in two_ranks.run(clipping_of_dense_model):
        assert calls == 1


def test_every_moe_layer_is_ours_and_the_context_is_restored(two_ranks: RankPool) -> None:
    for layers in two_ranks.run(layers_of_engine):
        assert layers == {"model.layers.0.mlp": ("two_stage", 2, 4), "model.layers.1.mlp": ("two_stage", 2, 4)}


def test_every_collective_gives_up_after_the_time_of_the_ds_config(two_ranks: RankPool) -> None:
    for seconds in two_ranks.run(limits_of_groups, 77):
        assert len(seconds) >= 3  # the world, the expert-parallel group, its replicas
        assert set(seconds) == {77}


def test_a_model_without_experts_trains_like_deepspeeds(two_ranks: RankPool) -> None:
    for first, last in two_ranks.run(losses_of_linear):
        assert last < first


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no model", "ds_hybrid.initialize(model=None): a torch.nn.Module is required."),
        ("no config", "ds_hybrid.initialize: no ds_config. Pass config= or --deepspeed_config FILE."),
        (
            "two configs",
            "ds_hybrid.initialize: args.deepspeed_config = a.json and config are both given. Pass one of them.",
        ),
        (
            "pipeline",
            "ds_hybrid.initialize(model=PipelineModule): not supported. Use a plain module.",
        ),
        (
            "three experts groups on two ranks",
            "expert_parallel.autoep_size = 3 (ds_config): must divide world_size 2. Values that work: 1, 2.",
        ),
        (
            "hybrid engine",
            f"hybrid_engine.enabled = true (ds_config): not available in {RELEASE}. Set it to false.",
        ),
        (
            "another mode on rank 1",
            'ds_hybrid: ranks 0 and 1 differ: {"dispatch": {"mode": "two_stage"}} and {"dispatch": {"mode": '
            '"alltoall"}}. Give every host the same ds_config and the same model.',
        ),
        (
            "another stage on rank 1",
            'zero_optimization: ranks 0 and 1 differ: {"stage": 1} and {"stage": 3}. '
            "Give every host the same ds_config and the same model.",
        ),
        ("a typo on rank 1", 'rank 1: zero_optimisation (ds_config): unknown key. Did you mean "zero_optimization"?'),
        (
            "another model on rank 1",
            "model.layers.0.mlp: ranks 0 and 1 differ: two_stage (guard True, auto on the wire), 8 experts, top-3, "
            "hidden size 32 and two_stage (guard True, auto on the wire), 8 experts, top-2, hidden size 32. Give every "
            "host the same ds_config and the same model.",
        ),
    ],
)
def test_mistakes_raise_one_readable_error_on_every_rank(two_ranks: RankPool, case: str, message: str) -> None:
    assert two_ranks.run(message_of_mistake, case) == [message, message]


def kinds_of_result(path: str) -> list[str]:
    model = make_model("mixtral")
    result = ds_hybrid.initialize(
        argparse.Namespace(deepspeed_config=path),
        model=model,
        model_parameters=model.parameters(),
        training_data=TensorDataset(torch.zeros(8, 4)),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    )
    assert isinstance(result, tuple)
    assert isinstance(result[0], MoEEngine)
    kinds = [type(part).__name__ for part in result]
    result[0].destroy()
    return kinds


def layers_of_engine() -> dict[str, tuple[str, int, int]]:
    model = make_model("qwen3_moe")
    engine, *_ = ds_hybrid.initialize(model=model, model_parameters=model.parameters(), config=Run().ds_config())
    assert all(isinstance(layer, HybridAutoEPLayer) for layer in engine.moe_layers_by_name().values())
    found = {
        name: (layer.dispatcher.mode, layer.placement.num_ranks, layer.experts.w1.shape[0])
        for name, layer in engine.moe_layers_by_name().items()
    }
    engine.destroy()
    return found


def limits_of_groups(seconds: int) -> list[float]:
    before = {group: _limit(group) for group in distributed_c10d._world.pg_map if group.rank() >= 0}
    config = Run().ds_config()
    config["ds_hybrid"]["topology"] = {"timeout_seconds": seconds}
    model = make_model("mixtral")
    ds_hybrid.initialize(model=model, model_parameters=model.parameters(), config=config)
    limits = [_limit(group) for group in distributed_c10d._world.pg_map if group.rank() >= 0]
    for group, limit in before.items():
        distributed_c10d._set_pg_timeout(timedelta(seconds=limit), group)
    return limits


def _limit(group: Any) -> float:
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def losses_of_linear() -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    config = {**Run().ds_config(), "expert_parallel": {"enabled": False}}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.05}}
    engine, *_ = ds_hybrid.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for _ in range(5):
        loss = (engine(torch.ones(2, 4)) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert engine.moe_stats().layers == ()
    engine.destroy()
    return losses[0], losses[-1]


def clipping_of_dense_model() -> int:
    """How often DeepSpeed's own clipping ran in a step."""
    model = nn.Linear(4, 1)
    config = {**Run(clip=0.1, zero_stage=0).ds_config(), "expert_parallel": {"enabled": False}}
    engine, *_ = ds_hybrid.initialize(model=model, model_parameters=model.parameters(), config=config)
    with pytest.MonkeyPatch.context() as patch:
        calls: list[float] = []
        patch.setattr(deepspeed_engine, "clip_grad_norm_", lambda **arguments: calls.append(arguments["max_norm"]))
        engine.backward(engine(torch.ones(2, 4)).mean())
        engine.step()
    engine.destroy()
    return len(calls)


def message_of_mistake(case: str) -> str:
    model: Any = nn.Linear(2, 2)
    config = Run().ds_config()
    other = dist.get_rank() == 1
    arguments: dict[str, Any] = {
        "no model": {"config": config},
        "no config": {"model": model},
        "two configs": {"model": model, "config": config, "args": argparse.Namespace(deepspeed_config="a.json")},
        "pipeline": {"model": PipelineModule([nn.Linear(2, 2)], num_stages=1), "config": config}
        if case == "pipeline"
        else {},
        "three experts groups on two ranks": {
            "model": model,
            "config": {**config, "expert_parallel": {"enabled": True, "autoep_size": 3}},
        },
        "another mode on rank 1": {
            "model": make_model("qwen3_moe"),
            "config": {**config, "ds_hybrid": {"dispatch": {"mode": "alltoall" if other else "two_stage"}}},
        },
        "another stage on rank 1": {
            "model": make_model("qwen3_moe"),
            "config": {**config, "zero_optimization": {"stage": 3 if other else 1}},
        },
        "a typo on rank 1": {"model": model, "config": {**config, **({"zero_optimisation": {}} if other else {})}},
        "another model on rank 1": {
            "model": make_model("qwen3_moe", num_experts_per_tok=2 if other else 3),
            "config": config,
        },
        "hybrid engine": {"model": model, "config": {**config, "hybrid_engine": {"enabled": True}}},
    }[case]
    try:
        ds_hybrid.initialize(**arguments)
    except ConfigError as error:
        return "\n".join(line for line in error.problems if not line.startswith("model.layers.1"))
    return "no error"
