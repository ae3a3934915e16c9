"""Tensor parallelism with expert parallelism trains as the plain Hugging Face model does on one process.

Plan A: the expert-parallel groups are the tensor-parallel groups, and nothing is dispatched. Plan B: they span
data-parallel ranks. Every parameter is compared, as a wrong gradient of a small one hardly shows in a loss. The size of
tensor-parallel groups is fixed for a process, so every size has ranks of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups

import ds_hybrid
from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.modes import MODES, Mode
from ds_hybrid.dispatch.shares import TokenShares
from ds_hybrid.engine import engine as engine_module
from ds_hybrid.errors import ConfigError
from ds_hybrid.topology import probe
from tests.multirank import test_moving_experts as moving
from tests.multirank.models import CONFIGS, VOCABULARY, is_known, make_model
from tests.multirank.test_presets import Comparison
from tests.multirank.training import (
    PLANS,
    Outcome,
    Run,
    batch,
    initial_parameters,
    largest_difference,
    make_engine,
    train_hybrid,
    train_plain,
    worst_parameter,
)
from tests.ranks import RankPool

LOSS_TOLERANCE = 5e-6
NORM_TOLERANCE = 2e-6
"""Relative."""
PARAMETER_TOLERANCE = 1e-3
"""Relative to the largest change of the parameter in five steps."""

PLAN_A = Run(mode="replicated", tp_size=2, ep_size=2, num_steps=5)
PLAN_B = Run(mode="two_stage", tp_size=2, ep_size=4, num_steps=5)

EIGHT_A = replace(PLAN_A, tp_size=4, ep_size=4, num_kv_heads=4)
EIGHT_B = PLAN_B
"""With two replicas of each expert."""

MODELS = ("mixtral", "qwen3_moe", "deepseek_v3")

MLP = [
    {"patterns": [r".*\.(mlp|shared_experts)\.(gate|up)_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.(mlp|shared_experts)\.down_proj\.weight$"], "partition_type": "row"},
]
SUMMED_BY_NAME = [
    {"patterns": [r".*\.self_attn\.[qk]_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True}
]


@pytest.fixture
def four_ranks_of_one_replica() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture
def eight_ranks() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("plan", [PLAN_A, PLAN_B], ids=["a", "b"])
@pytest.mark.parametrize("model_type", MODELS)
def test_plan_trains_like_the_plain_model(
    four_ranks: RankPool, model_type: str, plan: Run, zero_stage: int, clip: float
) -> None:
    assert_equal(four_ranks, replace(plan, model_type=model_type, zero_stage=zero_stage, clip=clip))


@pytest.mark.parametrize("plan", [PLAN_A, PLAN_B], ids=["a", "b"])
@pytest.mark.parametrize("model_type", sorted(CONFIGS.keys() - set(MODELS)))
def test_every_other_preset(four_ranks: RankPool, model_type: str, plan: Run) -> None:
    if not is_known(model_type):
        pytest.skip(f"the installed transformers has no {model_type}")
    assert_equal(four_ranks, replace(plan, model_type=model_type, clip=0.1))


@pytest.mark.parametrize("plan", [PLAN_A, PLAN_B], ids=["a", "b"])
def test_clipping_without_zero(four_ranks: RankPool, plan: Run) -> None:
    assert_equal(four_ranks, replace(plan, zero_stage=0, clip=0.1))


@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_every_dispatcher(four_ranks: RankPool, mode: str, ep_size: int) -> None:
    assert_equal(four_ranks, replace(PLAN_B, mode=mode, ep_size=ep_size, clip=0.1))


def test_hierarchical(four_ranks: RankPool) -> None:
    """Each node holds one tensor-parallel group."""
    for result in four_ranks.run(compare, replace(PLAN_B, mode="hierarchical", clip=0.1), cut_in_two):
        assert_close(result)


@pytest.mark.parametrize("plan", [PLAN_A, PLAN_B], ids=["a", "b"])
def test_evaluation_gives_the_logits_of_the_plain_model(four_ranks: RankPool, plan: Run) -> None:
    for difference in four_ranks.run(logits_difference, replace(plan, model_type="deepseek_v3")):
        assert difference <= 1e-5


@pytest.mark.parametrize("plan", [PLAN_A, PLAN_B], ids=["a", "b"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_accumulation_and_checkpointing(four_ranks: RankPool, plan: Run, zero_stage: int) -> None:
    assert_equal(
        four_ranks, replace(plan, zero_stage=zero_stage, accumulation=2, clip=0.1, checkpointing=zero_stage == 2)
    )


@pytest.mark.parametrize("plan", [PLAN_A, PLAN_B], ids=["a", "b"])
def test_chunks_and_lengths_that_differ(four_ranks: RankPool, plan: Run) -> None:
    """Some batches do not divide by the ranks that share them."""
    assert_equal(four_ranks, replace(plan, overlap_chunks=3, uneven=True, router_logits=True))


@pytest.mark.parametrize(
    ("model_type", "more"), [("deepseek_v3", MLP), ("qwen3_moe", SUMMED_BY_NAME)], ids=["mlp", "grad_allreduce"]
)
@pytest.mark.parametrize("plan", [PLAN_A, PLAN_B], ids=["a", "b"])
def test_other_partitions(four_ranks: RankPool, plan: Run, model_type: str, more: list[Any]) -> None:
    """Dense and shared experts sharded as well; and parameters that the user's file has AutoTP sum by name."""
    run = replace(plan, model_type=model_type, clip=0.1)
    for result in four_ranks.run(compare, run, None, more):
        assert_close(result)


@pytest.mark.parametrize("plan", [PLAN_A, PLAN_B], ids=["a", "b"])
def test_gradients_that_are_averaged_are_caught(four_ranks: RankPool, plan: Run) -> None:
    """What DeepSpeed alone does with q_norm and k_norm: half of their change on two ranks."""
    for result in four_ranks.run(compare, plan, leave_gradients):
        assert result.parameter.endswith((".q_norm.weight", ".k_norm.weight"))
        assert 0.4 < result.parameter_error < 0.6


@pytest.mark.parametrize("plan", [PLAN_A, PLAN_B], ids=["a", "b"])
def test_a_norm_without_all_experts_is_caught(four_ranks: RankPool, plan: Run) -> None:
    for result in four_ranks.run(compare, replace(plan, clip=0.1), unmark_experts):
        assert result.norm_error > 1000 * NORM_TOLERANCE


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("plan", [PLAN_A, PLAN_B], ids=["a", "b"])
def test_resume_equals_not_stopping(four_ranks: RankPool, tmp_path: Any, plan: Run, zero_stage: int) -> None:
    run = replace(plan, zero_stage=zero_stage)
    for straight, resumed in four_ranks.run(losses_of_both, run, str(tmp_path)):
        assert resumed == straight


@pytest.mark.parametrize("mode", ["alltoall", "replicated"])
def test_every_token_counts_once(four_ranks: RankPool, mode: Mode) -> None:
    """Two data-parallel ranks with 2 x 12 tokens and top-3 each; their tensor-parallel ranks have the same tokens."""
    for stats in four_ranks.run(stats_of_one_step, replace(PLAN_A, mode=mode)):
        assert [layer.mode for layer in stats.layers] == [mode, mode]
        assert [layer.num_tokens for layer in stats.layers] == [48, 48]
        assert [sum(layer.expert_load) for layer in stats.layers] == [144, 144]


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 7])
def test_shares_join_to_the_whole(four_ranks: RankPool, num_tokens: int) -> None:
    for rank, (sizes, output, gradient, payload) in enumerate(four_ranks.run(shared_out, num_tokens)):
        longest = -(-num_tokens // 4)
        assert sizes == max(0, min(longest, num_tokens - rank * longest))
        assert output == [[3.0 * row, 3.0 * row + 30] for row in range(num_tokens)]
        assert gradient == [[3.0, 6.0]] * num_tokens
        assert payload == 2 * 3 * longest * 2 * 8  # forward and backward, to three ranks, two float64 a token


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (
            [{"patterns": [r".*\.self_attn\.q_proj\.weight$"], "partition_type": "column"}],
            "tensor_parallel.partition_config: model.layers.0.self_attn.q_proj is column-parallel and its module "
            "holds no row-parallel linear. Add one that takes its columns, or leave it whole.",
        ),
        (
            [{"patterns": [r".*\.self_attn\.(v|o)_proj\.weight$"], "partition_type": "row"}],
            "tensor_parallel.partition_config: model.layers.0.self_attn.v_proj and model.layers.0.self_attn.o_proj are "
            "row-parallel in one module. Gradients are summed for modules with one. Shard one of them.",
        ),
        (
            [
                {"patterns": [r".*\.self_attn\.o_proj\.weight$"], "partition_type": "row"},
                {
                    "patterns": [r".*\.self_attn\.q_proj\.weight$"],
                    "partition_type": "column",
                    "gather_output": True,
                },
            ],
            "tensor_parallel.partition_config: model.layers.0.self_attn.q_proj becomes a LinearLayer with gathered "
            "output beside the row-parallel model.layers.0.self_attn.o_proj. Gradients are right for column-parallel "
            "linears without gathered output there. Leave it whole.",
        ),
    ],
    ids=["column alone", "two rows", "gathered"],
)
def test_partition_that_is_refused(four_ranks: RankPool, specs: list[Any], message: str) -> None:
    for problems in four_ranks.run(problems_of, PLAN_B, specs):
        assert problems[0] == message


@pytest.mark.parametrize("plan", [EIGHT_A, EIGHT_B], ids=["a", "b"])
def test_plans_on_eight_ranks(eight_ranks: RankPool, plan: Run) -> None:
    for model_type in MODELS:
        assert_equal(eight_ranks, replace(plan, model_type=model_type, clip=0.1))
    for zero_stage, clip in ((2, 0.0), (3, 0.1)):
        assert_equal(eight_ranks, replace(plan, zero_stage=zero_stage, clip=clip))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [EIGHT_A, EIGHT_B], ids=["a", "b"])
def test_every_case_on_eight_ranks(eight_ranks: RankPool, plan: Run) -> None:
    for model_type, zero_stage, clip in product(MODELS, (1, 2, 3), (0.0, 0.1)):
        assert_equal(eight_ranks, replace(plan, model_type=model_type, zero_stage=zero_stage, clip=clip))


def test_expert_groups_inside_a_tensor_parallel_group(four_ranks_of_one_replica: RankPool) -> None:
    assert_equal(four_ranks_of_one_replica, replace(PLAN_B, tp_size=4, ep_size=2, clip=0.1))


def test_ranks_without_key_value_heads(four_ranks_of_one_replica: RankPool) -> None:
    """Of two heads for four ranks, DeepSpeed gives two ranks none."""
    run = replace(PLAN_A, tp_size=4, ep_size=4, num_kv_heads=2, clip=0.1)
    assert_equal(four_ranks_of_one_replica, replace(run, zero_stage=2))
    message = (
        "tensor_parallel.autotp_size = 4: model.layers.0.self_attn.q_proj has key-value heads for 2 ranks, and "
        "zero_optimization.stage 3 trains no rank without any. Set autotp_size to 2 or the stage to 2."
    )
    assert four_ranks_of_one_replica.run(problems_of, replace(run, zero_stage=3)) == [(message,)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["a", "b"])
def test_shipped_plans_on_sixteen_ranks(plan: str) -> None:
    """The sizes of the shipped files: two steps against the plain model, and two as the file has them."""
    document = PLANS[plan]
    run = Run(
        mode=document["ds_hybrid"]["dispatch"]["mode"],
        tp_size=document["tensor_parallel"]["autotp_size"],
        ep_size=document["expert_parallel"]["autoep_size"],
        num_steps=2,
        num_kv_heads=4,
        clip=0.1,
    )
    pool = RankPool(16)
    try:
        for result in pool.run(compare, run, limit=480.0):
            assert_close(result)
        losses = pool.run(losses_of_file, document, limit=480.0)
        assert all(first > second for first, second in losses)
    finally:
        pool.close()


def assert_equal(pool: RankPool, run: Run) -> None:
    for result in pool.run(compare, run, limit=30.0 * max(4, pool.world_size)):
        assert_close(result)


def assert_close(result: Comparison) -> None:
    assert result.loss_error <= LOSS_TOLERANCE, result
    assert result.parameter_error <= PARAMETER_TOLERANCE, result
    assert result.norm_error <= NORM_TOLERANCE, result


def compare(
    run: Run, spoil: Callable[[pytest.MonkeyPatch], None] | None = None, more_specs: list[Any] | None = None
) -> Comparison:
    # The plain model does not depend on what is not named here.
    reference = plain(replace(run, mode="two_stage", ep_size=1, zero_stage=0, overlap_chunks=1, checkpointing=None))
    with pytest.MonkeyPatch.context() as patch:
        if spoil is not None:
            spoil(patch)
        add_specs(patch, more_specs or [])
        trained = train_hybrid(run)
    error, name = worst_parameter(trained, reference, initial_parameters(run))
    norms = zip(trained.norms, reference.norms, strict=True)
    return Comparison(
        loss_error=largest_difference(trained.losses, reference.losses),
        parameter_error=error,
        parameter=name,
        norm_error=max(abs(ours / theirs - 1) for ours, theirs in norms),
    )


@cache
def plain(run: Run) -> Outcome:
    return train_plain(run, dist.get_world_size())


def add_specs(patch: pytest.MonkeyPatch, specs: list[Any], *, instead: bool = False) -> None:
    """Let the runs' partition_config hold more, or other, layer_specs."""
    section = PLANS["a"]["tensor_parallel"]
    given = section["partition_config"]
    layer_specs = specs if instead else [*given["layer_specs"], *specs]
    patch.setitem(section, "partition_config", {**given, "layer_specs": layer_specs})


def leave_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_module, "sum_gradients_of_blocks", lambda model, group: None)


def unmark_experts(patch: pytest.MonkeyPatch) -> None:
    configure = engine_module.MoEEngine._configure_optimizer

    def unmarked(engine: Any, *args: Any) -> None:
        for layer in engine.moe_layers_by_name().values():
            for parameter in layer.experts.parameters():
                parameter.tensor_model_parallel = False
        configure(engine, *args)

    patch.setattr(engine_module.MoEEngine, "_configure_optimizer", unmarked)


def cut_in_two(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(probe, "key_of_this_host", lambda: f"node {dist.get_rank() // 2}")


def logits_difference(run: Run) -> float:
    ids = batch(0, dist.get_rank() // run.tp_size)
    engine = make_engine(run)
    engine.eval()
    with torch.no_grad():
        ours, plain_ones = engine(input_ids=ids).logits, make_model(run.model_type).eval()(input_ids=ids).logits
    engine.destroy()
    return float((ours - plain_ones).abs().max())


def losses_of_both(run: Run, folder: str) -> tuple[list[float], list[float]]:
    """Losses of steps 2 and 3: straight on after a save at step 2, and in a new engine that loaded it."""
    straight = make_engine(run)
    train(straight, run, range(2))
    straight.save_checkpoint(folder)
    expected = train(straight, run, range(2, 4))
    straight.destroy()
    resumed = make_engine(run)
    resumed.load_checkpoint(folder)
    losses = train(resumed, run, range(2, 4))
    resumed.destroy()
    return expected, losses


def train(engine: Any, run: Run, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = batch(step, dist.get_rank() // run.tp_size)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def stats_of_one_step(run: Run) -> Any:
    engine = make_engine(run)
    train(engine, run, range(1))
    stats = engine.moe_stats()
    engine.destroy()
    return stats


def shared_out(num_tokens: int) -> tuple[int, list[list[float]], list[list[float]], int]:
    """The size of this rank's share, the output and the gradient of tokens that are tripled, and the bytes sent."""
    meter = Meter()
    shares = TokenShares(RankGroup(dist.group.WORLD, meter), num_tokens)
    rows = torch.arange(num_tokens, dtype=torch.float64)
    tokens = torch.stack([rows, rows + 10], 1).requires_grad_()
    share = shares.take(tokens)
    output = shares.join(3 * share)
    (output * torch.tensor([1.0, 2.0])).sum().backward()
    assert tokens.grad is not None
    return len(share), output.tolist(), tokens.grad.tolist(), meter.take().payload


def problems_of(run: Run, specs: list[Any] | None = None) -> tuple[str, ...]:
    with pytest.MonkeyPatch.context() as patch:
        if specs is not None:
            add_specs(patch, specs, instead=True)
        with pytest.raises(ConfigError) as error:
            make_engine(run)
    return error.value.problems


def losses_of_file(document: dict[str, Any]) -> list[float]:
    """Of two steps over one batch, as a shipped file has them, but that warming up would leave the weights alone."""
    model = make_model("qwen3_moe", num_key_value_heads=4)
    config = {key: value for key, value in document.items() if key != "scheduler"}
    engine, *_ = ds_hybrid.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank = dist.get_rank(group=groups._get_data_parallel_group())
    ids = torch.randint(0, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    return losses


@pytest.mark.parametrize("ep_size", [2, 4])
def test_experts_move(four_ranks: RankPool, ep_size: int) -> None:
    """Among the ranks of a tensor-parallel group, and across two of them."""
    run = replace(moving.CONVERTED, tp_size=2, ep_size=ep_size, num_kv_heads=4, num_steps=4)
    for outcome in four_ranks.run(moving.compare, run):
        moving.check(outcome, bf16=False)
