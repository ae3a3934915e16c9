"""Every AutoEP preset trains through ds_hybrid as the plain Hugging Face model does on one process.

Run on the newest transformers and, by launch/test.sh, once more on the newest one that DeepSpeed's own AutoEP accepts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version

from ds_hybrid.dispatch.modes import MODES, Mode
from ds_hybrid.errors import ConfigError
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.topology import probe
from tests.multirank.models import CONFIGS, VOCABULARY, is_known, make_model
from tests.multirank.training import (
    Outcome,
    Run,
    all_experts,
    batch,
    initial_parameters,
    largest_difference,
    make_engine,
    train_hybrid,
    train_plain,
    worst_parameter,
)
from tests.ranks import RankPool

NEWEST = Version(transformers.__version__) >= Version("5.24")

LOSS_TOLERANCE = 5e-6
NORM_TOLERANCE = 5e-5
PARAMETER_TOLERANCE = 2e-3
"""Relative to the largest change of the parameter; rounding alone stays under 6e-4 at the smallest changes."""


@dataclass(frozen=True)
class Comparison:
    """Against the plain model: the largest loss difference, the worst parameter and the largest norm difference."""

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


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("mode", MODES)
def test_chunks_train_like_the_plain_model(four_ranks: RankPool, mode: Mode, checkpointing: bool | None) -> None:
    assert_equal(four_ranks, Run(mode=mode, ep_size=4, overlap_chunks=3, checkpointing=checkpointing, num_steps=5))


@pytest.mark.parametrize("node_of_rank", [(0, 0, 1, 1), (0, 1, 1, 0)])
def test_hierarchical_trains_like_the_plain_model(four_ranks: RankPool, node_of_rank: tuple[int, ...]) -> None:
    for result in four_ranks.run(compare_over_nodes, Run(mode="hierarchical", ep_size=4), node_of_rank):
        assert result.loss_error <= LOSS_TOLERANCE, result
        assert result.parameter_error <= PARAMETER_TOLERANCE, result


def test_hierarchical_on_one_node_is_refused(four_ranks: RankPool) -> None:
    message = (
        'ds_hybrid.dispatch.mode = "hierarchical": the expert-parallel group [0, 1, 2, 3] lies on one node. '
        'Set it to "two_stage" or "auto".'
    )
    assert four_ranks.run(message_of_one_node) == [message] * 4


@pytest.mark.parametrize(("wire_dtype", "tolerance"), [("bf16", 2e-3), ("fp8_e4m3", 2e-2)])
def test_rounding_on_the_wire_moves_the_losses_little(four_ranks: RankPool, wire_dtype: str, tolerance: float) -> None:
    for result in four_ranks.run(compare, Run(ep_size=4, wire_dtype=wire_dtype, num_steps=1)):
        assert LOSS_TOLERANCE < result.loss_error <= tolerance, result


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
        assert shapes[0] == shapes[1]
        assert shapes[0] or not NEWEST  # the DeepSeek models of 5.8 record none
        assert difference <= 1e-5


def test_the_newest_transformers_has_every_preset() -> None:
    """So that no comparison above is skipped there."""
    if NEWEST:
        assert all(is_known(model_type) for model_type in CONFIGS)


@pytest.mark.parametrize("mode", MODES)
def test_logits_do_not_depend_on_where_experts_live(four_ranks: RankPool, mode: Mode) -> None:
    for difference in four_ranks.run(effect_of_placement, mode):
        assert difference <= 1e-5


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("mode", MODES)
def test_all_tokens_to_the_experts_of_one_rank(two_ranks: RankPool, mode: Mode, checkpointing: bool | None) -> None:
    """The other rank's experts starve, and join every backward with zeros."""
    for load, gradients in two_ranks.run(starved_gradients, Run(mode=mode, checkpointing=checkpointing, zero_stage=0)):
        assert load == [24, 24, 24, 0, 0, 0, 0, 0]
        assert gradients[0] > 0
        assert gradients[1] == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_without_tokens(two_ranks: RankPool, mode: Mode) -> None:
    shapes = two_ranks.run(shapes_without_tokens, mode)
    assert shapes == [((2, 5, 32), True), ((0, 5, 32), True)]


def test_routers_stay_equal_on_all_ranks(four_ranks: RankPool) -> None:
    routers = four_ranks.run(routers_after_training, Run(num_steps=20, zero_stage=1, ep_size=2))
    for router in routers[1:]:
        assert torch.equal(router, routers[0])


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non_reentrant"])
def test_recomputation_counts_no_token_twice(two_ranks: RankPool, use_reentrant: bool) -> None:
    plain, _ = two_ranks.run(stats_of_two_steps, Run())[0]
    recomputed, _ = two_ranks.run(stats_of_two_steps, Run(checkpointing=use_reentrant))[0]
    for one, other in zip(plain.layers, recomputed.layers, strict=True):
        assert one.num_tokens == other.num_tokens
        assert one.expert_load == other.expert_load
        assert one.payload < other.payload
        assert one.payload / one.lower_bound == pytest.approx(other.payload / other.lower_bound, rel=0.01)


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
    first, second = two_ranks.run(stats_of_two_steps, Run())[0]
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
        assert result.norm_error <= NORM_TOLERANCE, result


def compare(run: Run, spoilt: bool = False) -> Comparison:
    return compare_with_plain(train_hybrid(run, spoil if spoilt else None), run)


def compare_with_plain(trained: Outcome, run: Run) -> Comparison:
    reference = train_plain(run, dist.get_world_size())
    error, name = worst_parameter(trained, reference, initial_parameters(run))
    return Comparison(
        loss_error=largest_difference(trained.losses, reference.losses),
        parameter_error=error,
        parameter=name,
        # Without ZeRO DeepSpeed computes a norm only to clip by it.
        norm_error=largest_difference(trained.norms, reference.norms) if run.clip or run.zero_stage else 0.0,
    )


def compare_over_nodes(run: Run, node_of_rank: tuple[int, ...]) -> Comparison:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "key_of_this_host", lambda: f"node {node_of_rank[dist.get_rank()]}")
        return compare(run)


def message_of_one_node() -> str:
    with pytest.raises(ConfigError) as error:
        make_engine(Run(mode="hierarchical", ep_size=4))
    return str(error.value)


def spoil(engine: Any) -> None:
    """Every expert answers a thousandth too much on its way home."""
    for layer in engine.moe_layers_by_name().values():

        def spoiled(partial_sums: Any, plan: Any, combine: Any = layer.dispatcher.combine) -> Any:
            return (yield from combine(partial_sums, plan)) * 1.001

        layer.dispatcher.combine = spoiled


def router_logits_difference(model_type: str) -> tuple[list[Any], float]:
    ids = batch(0, dist.get_rank())
    plain = make_model(model_type).eval()(input_ids=ids, output_router_logits=True)
    engine = make_engine(Run(model_type))
    engine.eval()
    ours = engine(input_ids=ids, output_router_logits=True)
    recorded = [getattr(output, "router_logits", None) or () for output in (plain, ours)]
    shapes = [[tuple(logits.shape) for logits in of_model] for of_model in recorded]
    return shapes, max((float((a - b).abs().max()) for a, b in zip(*recorded, strict=False)), default=0.0)


def evaluates_identically(mode: Mode) -> bool:
    engine = make_engine(Run(mode=mode))
    engine.eval()
    ids = batch(0, dist.get_rank())
    with torch.no_grad():
        first, second = (engine(input_ids=ids).logits for _ in range(2))
    engine.destroy()
    return torch.equal(first, second)


def effect_of_padding(mode: Mode) -> float:
    engine = make_engine(Run(mode=mode))
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


def effect_of_placement(mode: Mode) -> float:
    """Move every expert to a random place, and compare the logits."""
    engine = make_engine(Run(mode=mode, ep_size=4))
    engine.eval()
    ids = batch(0, dist.get_rank())
    with torch.no_grad():
        before = engine(input_ids=ids).logits
        for seed, layer in enumerate(engine.moe_layers_by_name().values()):
            order = np.random.default_rng(seed).permutation(layer.num_experts).reshape(4, -1)
            layer.placement = ExpertPlacement.from_slots(order)
            for weight in layer.experts.parameters():
                weight.copy_(all_experts(weight, layer.ep_group)[order[layer.ep_rank]])
        after = engine(input_ids=ids).logits
    engine.destroy()
    return float((before - after).abs().max())


def starved_gradients(run: Run) -> tuple[list[int], list[float]]:
    """The load of the first layer's experts by this rank's tokens, and its expert gradients' size on both ranks."""
    engine = make_engine(run)
    layers = engine.moe_layers_by_name().values()
    for layer in layers:
        layer.router.register_forward_hook(
            lambda _router, _args, out: (out[0], torch.arange(3).expand_as(out[1]), out[2])
        )
    ids = batch(0, dist.get_rank())
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    layer = next(iter(layers))
    size = layer.experts.w1.grad.abs().sum()
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    load = layer.expert_load.tolist()
    engine.destroy()
    return load, [float(size) for size in sizes]


def shapes_without_tokens(mode: Mode) -> tuple[tuple[int, ...], bool]:
    """Rank 1 has an empty batch: the shape of its output, and whether every gradient is there and finite."""
    engine = make_engine(Run(mode=mode, zero_stage=0))
    layer = next(iter(engine.moe_layers_by_name().values()))
    tokens = torch.randn(2 - 2 * dist.get_rank(), 5, 32).requires_grad_()
    output = layer(tokens)
    output.square().sum().backward()
    gradients = [tokens.grad, *(parameter.grad for parameter in layer.parameters())]
    engine.destroy()
    return tuple(output.shape), all(g is not None and bool(g.isfinite().all()) for g in gradients)


def routers_after_training(run: Run) -> torch.Tensor:
    trained = train_hybrid(run).parameters
    return torch.cat([value.flatten() for name, value in sorted(trained.items()) if name.endswith(".gate.weight")])


def stats_of_two_steps(run: Run) -> tuple[Any, Any]:
    engine = make_engine(run)
    found = []
    for step in range(2):
        ids = batch(step, dist.get_rank())
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        found.append(engine.moe_stats())
    engine.destroy()
    return found[0], found[1]
