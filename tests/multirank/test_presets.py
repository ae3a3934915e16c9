"""Every AutoEP preset trains through ds_hybrid as the plain Hugging Face model does on one process.

Run on the newest transformers and, by launch/test.sh, once more on the newest one that DeepSpeed's own AutoEP accepts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_hybrid
from ds_hybrid.dispatch.modes import MODES, Mode
from tests.multirank.models import CONFIGS, VOCABULARY, is_known, make_model
from tests.multirank.training import (
    Run,
    batch,
    initial_parameters,
    train_hybrid,
    train_plain,
    worst_parameter,
)
from tests.ranks import RankPool

LOSS_TOLERANCE = 5e-6
PARAMETER_TOLERANCE = 2e-3
"""Relative to the largest change of the parameter; rounding alone stays under 6e-4 at the smallest changes."""


@dataclass(frozen=True)
class Comparison:
    """Largest loss difference, worst parameter and largest norm difference against the plain model."""

    loss_error: float
    parameter_error: float
    parameter: str
    norm_error: float


@pytest.mark.parametrize("model_type", CONFIGS)
def test_preset_trains_like_the_plain_model(two_ranks: RankPool, model_type: str) -> None:
    if not is_known(model_type):
        pytest.skip(f"the installed transformers has no {model_type}")
    assert_equal(two_ranks, Run(model_type, clip=0.5))


@pytest.mark.parametrize("mode", MODES)
def test_dispatcher_trains_like_the_plain_model(four_ranks: RankPool, mode: Mode) -> None:
    assert_equal(four_ranks, Run(mode=mode, ep_size=4))


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_zero_stage_trains_like_the_plain_model(four_ranks: RankPool, zero_stage: int, ep_size: int) -> None:
    assert_equal(four_ranks, Run(zero_stage=zero_stage, ep_size=ep_size, clip=0.5))


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non_reentrant"])
@pytest.mark.parametrize("mode", MODES)
def test_checkpointing_and_accumulation(four_ranks: RankPool, mode: Mode, use_reentrant: bool) -> None:
    assert_equal(four_ranks, Run(mode=mode, checkpointing=use_reentrant, accumulation=2, zero_stage=2))


@pytest.mark.parametrize("mode", MODES)
def test_lengths_that_differ_between_ranks_and_steps(four_ranks: RankPool, mode: Mode) -> None:
    assert_equal(four_ranks, Run(mode=mode, ep_size=4, uneven=True, zero_stage=2))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_auxiliary_loss_counts_once(two_ranks: RankPool, model_type: str) -> None:
    assert_equal(two_ranks, Run(model_type, router_logits=True))


@pytest.mark.parametrize("model_type", CONFIGS)
def test_router_logits_are_those_of_the_plain_model(two_ranks: RankPool, model_type: str) -> None:
    if not is_known(model_type):
        pytest.skip(f"the installed transformers has no {model_type}")
    for shapes, difference in two_ranks.run(router_logits_difference, model_type):
        assert shapes[0] == shapes[1] != []
        assert difference <= 1e-5


def test_a_dispatcher_wrong_by_a_thousandth_is_caught(two_ranks: RankPool) -> None:
    spoilt = two_ranks.run(compare, Run(), True)[0]
    assert spoilt.loss_error > 10 * LOSS_TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_twice_gives_identical_logits(two_ranks: RankPool, mode: Mode) -> None:
    assert two_ranks.run(evaluates_identically, mode) == [True, True]


@pytest.mark.parametrize("mode", MODES)
def test_padding_changes_nothing_for_the_other_tokens(two_ranks: RankPool, mode: Mode) -> None:
    """Masked tokens, whatever their ids, do not reach the logits of the others (up to the order of sums)."""
    for difference in two_ranks.run(effect_of_padding, mode):
        assert difference <= 1e-5


def test_stats_count_training_and_start_anew(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(stats_of_two_steps)[0]
    num_tokens = 2 * 2 * 12
    for stats in (first, second):
        assert [layer.name for layer in stats.layers] == ["model.layers.0.mlp", "model.layers.1.mlp"]
        assert [layer.num_tokens for layer in stats.layers] == [num_tokens, num_tokens]
        assert [sum(layer.expert_load) for layer in stats.layers] == [3 * num_tokens, 3 * num_tokens]
        assert all(layer.mode == "two_stage" for layer in stats.layers)
        assert stats.lower_bound_ratio > 1.0
        assert stats.load_max_over_mean >= 1.0
        expected = sum((layer.payload + layer.metadata) / num_tokens for layer in stats.layers)
        assert stats.wire_bytes_per_token == pytest.approx(expected)


def assert_equal(pool: RankPool, run: Run) -> None:
    for result in pool.run(compare, run):
        assert result.loss_error <= LOSS_TOLERANCE, result
        assert result.parameter_error <= PARAMETER_TOLERANCE, result
        assert result.norm_error <= 1e-5, result


def compare(run: Run, spoilt: bool = False) -> Comparison:
    reference = train_plain(run, dist.get_world_size())
    trained = train_hybrid(run, spoil if spoilt else None)
    error, name = worst_parameter(trained, reference, initial_parameters(run))
    return Comparison(
        loss_error=max(abs(a - b) for a, b in zip(trained.losses, reference.losses, strict=True)),
        parameter_error=error,
        parameter=name,
        norm_error=max(
            abs(a - b) / b for a, b in zip(trained.norms, reference.norms, strict=True) if run.clip or run.zero_stage
        ),
    )


def spoil(engine: Any) -> None:
    """Every expert answers a thousandth too much on its way home."""
    for layer in engine.moe_layers_by_name().values():
        combine = layer.dispatcher.combine
        layer.dispatcher.combine = lambda rows, state, combine=combine: combine(rows, state) * 1.001


def _engine(run: Run) -> Any:
    model = make_model(run.model_type)
    return ds_hybrid.initialize(model=model, model_parameters=model.parameters(), config=run.ds_config())[0]


def router_logits_difference(model_type: str) -> tuple[list[Any], float]:
    ids = batch(0, dist.get_rank())
    plain = make_model(model_type).eval()(input_ids=ids, output_router_logits=True)
    engine = _engine(Run(model_type))
    engine.eval()
    ours = engine(input_ids=ids, output_router_logits=True)
    shapes = [[tuple(logits.shape) for logits in output.router_logits or ()] for output in (plain, ours)]
    pairs = zip(plain.router_logits or (), ours.router_logits or (), strict=False)
    return shapes, max((float((a - b).abs().max()) for a, b in pairs), default=0.0)


def evaluates_identically(mode: Mode) -> bool:
    engine = _engine(Run(mode=mode))
    engine.eval()
    ids = batch(0, dist.get_rank())
    with torch.no_grad():
        first, second = (engine(input_ids=ids).logits for _ in range(2))
    engine.destroy()
    return torch.equal(first, second)


def effect_of_padding(mode: Mode) -> float:
    engine = _engine(Run(mode=mode))
    engine.eval()
    ids = batch(0, dist.get_rank())
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    mask[1, 5:] = 0
    other_padding = torch.where(mask.bool(), ids, (ids + 17) % VOCABULARY)
    with torch.no_grad():
        first, second = (engine(input_ids=i, attention_mask=mask).logits for i in (ids, other_padding))
    engine.destroy()
    return float((first - second)[mask.bool()].abs().max())


def stats_of_two_steps() -> tuple[Any, Any]:
    run = replace(Run(), num_steps=1)
    engine = _engine(run)
    found = []
    for step in range(2):
        ids = batch(step, dist.get_rank())
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        found.append(engine.moe_stats())
    engine.destroy()
    return found[0], found[1]
