"""What a run writes down under other layouts: against the routers' own choices, the formulas, and what was trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

import ds_hybrid
from ds_hybrid.attention.shards import Shards
from ds_hybrid.attention.traffic import KVShape, backward_bytes, forward_bytes
from ds_hybrid.dispatch.traffic import backward_traffic, forward_traffic
from ds_hybrid.errors import ConfigError
from ds_hybrid.observe.events import LayerStep, StepRecord, TimelineRecord
from ds_hybrid.observe.run_directory import find_timelines, read_events
from ds_hybrid.rebalance.trace import PARTS_FOLDER, read_trace
from tests.multirank import sequences
from tests.multirank.models import CONFIGS
from tests.multirank.sequences import Sequences
from tests.multirank.test_moving_experts import loss_of
from tests.multirank.training import Run, make_prepared
from tests.multirank.witness import Seen, engine_of, loads_of, train, watched
from tests.ranks import RankPool

NUM_STEPS, INTERVAL = 4, 2
ZERO = Run(mode="two_stage", accumulation=2, adam=True)
EVERY_PARAMETER = {"stage3_param_persistence_threshold": 0}
PLAN_A = Run(mode="replicated", tp_size=2, ep_size=2, accumulation=2)
PLAN_B = Run(mode="two_stage", tp_size=2, ep_size=4, accumulation=2)
RING = Sequences(kv_gather="ring", kind="packed", accumulation=2, num_steps=NUM_STEPS)


def observed(run: Run, folder: Path | None, changes: dict[str, Any] | None = None) -> Seen:
    """``changes`` are of the ds_config."""
    engine = engine_of(make_prepared(run), run.ds_config() | (changes or {}), folder)
    with watched(engine, []) as seen:
        for step in range(NUM_STEPS):
            train(engine, run, range(step, step + 1))
            engine.eval()
            with torch.no_grad():
                loss_of(engine, run, step + 100, 0)
            engine.train()
    engine.destroy()
    return seen[0]


def check(record: StepRecord, ranks: list[Seen], run: Run | Sequences, *, share_size: int = 1) -> None:
    """The record of some steps against what ``ranks`` saw in them.

    Args:
        share_size: ranks with the same tokens, of which each routes a share.
    """
    calls = range((record.step - INTERVAL) * run.accumulation, record.step * run.accumulation)
    losses = [seen.losses[call] for seen in ranks for call in calls]
    assert record.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert record.samples == record.step * ranks[0].batch_size
    assert len(record.host_memory) == len(ranks)
    assert [layer.name for layer in record.layers] == list(ranks[0].shapes)
    loads = loads_of(ranks[::share_size], calls)
    for number, layer in enumerate(record.layers):
        assert list(layer.load) == loads[number]
        assert layer.rank_load == tuple(
            sum(layer.load[expert] for expert in place) for place in ranks[0].placements[layer.name].expert_of_slot
        )
        assert record.tokens * ranks[0].shapes[layer.name].top_k == sum(layer.load)
        check_bytes(layer, [[seen.ids[number][call] for seen in ranks] for call in calls], ranks[0], share_size)
    sent = sum(sum(layer.wire_bytes.values()) for layer in record.layers)
    bound = sum(layer.lower_bound for layer in record.layers)
    assert record.lower_bound_ratio == (pytest.approx(sent / bound) if bound else None)
    assert record.wire_bytes_per_token == pytest.approx(sent / record.tokens)


def check_bytes(layer: LayerStep, calls: list[list[np.ndarray]], seen: Seen, share_size: int) -> None:
    """By the formulas, from each call's choices of each rank's tokens."""
    shape, rank_of = seen.shapes[layer.name], seen.placements[layer.name].rank_of_expert
    wire = bound = 0
    for ids in calls:
        if layer.mode != "replicated" and share_size > 1:
            # Each takes its share through the experts. Outputs are joined in forward; the gradients of the tokens and
            # of the weights in backward.
            longest = -(-len(ids[0]) // share_size)
            joined = longest * (2 * shape.row_bytes + shape.riding_bytes) * (share_size - 1)
            wire += joined * len(ids)
            ids = [
                each[rank % share_size * longest : (rank % share_size + 1) * longest] for rank, each in enumerate(ids)
            ]
        for group in seen.groups:
            choices = [rank_of[ids[rank]] for rank in group]
            mode: Any = layer.mode
            for traffic in (forward_traffic(mode, choices, shape), backward_traffic(mode, choices, shape)):
                wire += int((traffic.payload + traffic.metadata).sum())
                bound += int(traffic.lower_bound.sum())
    assert (sum(layer.wire_bytes.values()), layer.lower_bound) == (wire, bound)
    assert set(layer.wire_bytes) <= {layer.mode}


def check_timeline(timeline: TimelineRecord, num_ranks: int, num_layers: int, num_calls: int) -> None:
    """Each layer of each rank works once in each call, inside a pass of the whole model."""
    assert len(timeline.ranks) == num_ranks
    for rank in range(num_ranks):
        spans = timeline.spans(rank)
        for phase in ("forward", "backward"):
            passes = [span for span in spans if span.name == phase and span.layer is None]
            assert len(passes) == num_calls
            works = [span for span in spans if span.layer is not None and span.phase == phase]
            for name in ("dispatch", "experts", "combine"):
                of_name = [span for span in works if span.name == name]
                # A work that waits on its way is noted between its pauses.
                pieces = 2 if phase == "forward" and name != "experts" else 1
                assert len(of_name) == pieces * num_layers * num_calls, (phase, name)
            for work in works:
                assert any(
                    whole.start - 2e-6 <= work.start and work.start + work.seconds <= whole.start + whole.seconds + 2e-6
                    for whole in passes
                ), work
        assert [span.name for span in spans if span.phase == "step" and span.name == "optimizer"] == ["optimizer"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_stages(four_ranks: RankPool, tmp_path: Path, stage: int) -> None:
    """Also where every parameter is partitioned and the experts are gathered in the middle of a dispatch."""
    run = replace(ZERO, zero_stage=stage, zero_options=EVERY_PARAMETER if stage == 3 else {})
    ranks = four_ranks.run(observed, run, tmp_path)
    check_run(tmp_path, ranks, run)
    assert [seen.losses for seen in ranks] == [seen.losses for seen in four_ranks.run(observed, run, None)]


def check_run(folder: Path, ranks: list[Seen], run: Run, share_size: int = 1) -> None:
    read = read_events(folder)
    assert [record.step for record in read.steps] == [2, 4]
    for record in read.steps:
        check(record, ranks, run, share_size=share_size)
    check_timeline(find_timelines(folder).read(4), len(ranks), len(ranks[0].shapes), run.accumulation)
    check_trace(folder, ranks, run, share_size)


def check_trace(folder: Path, ranks: list[Seen], run: Run | Sequences, share_size: int = 1) -> None:
    calls_of_step = [range(step * run.accumulation, (step + 1) * run.accumulation) for step in range(NUM_STEPS)]
    assert read_trace(folder).counts.tolist() == [loads_of(ranks[::share_size], calls) for calls in calls_of_step]


@pytest.fixture
def four_ranks_in_twos() -> Iterator[RankPool]:
    """The size of tensor-parallel groups is fixed for a process."""
    pool = RankPool(4)
    yield pool
    pool.close()


def test_tensor_parallel_groups(four_ranks_in_twos: RankPool, tmp_path: Path) -> None:
    """Tokens that two ranks have are counted once; bytes are those of both, of the joined shares too."""
    for name, run in {"a": PLAN_A, "b": PLAN_B}.items():
        ranks = four_ranks_in_twos.run(observed, run, tmp_path / name)
        check_run(tmp_path / name, ranks, run, share_size=2)
        begun = read_events(tmp_path / name).runs[0]
        assert (begun.world_size, begun.tp_size) == (4, 2)


@pytest.fixture
def one_rank() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.close()


def test_one_rank_alone(one_rank: RankPool, tmp_path: Path) -> None:
    run = Run(mode="auto", ep_size=1, accumulation=2)
    ranks = one_rank.run(observed, run, tmp_path)
    check_run(tmp_path, ranks, run)
    for record in read_events(tmp_path).steps:
        assert (record.lower_bound_ratio, record.wire_bytes_per_token) == (None, 0)
        assert [layer.rank_load_max_over_mean for layer in record.layers] == [1, 1]


def observed_sequences(run: Sequences, folder: Path) -> tuple[Seen, list[float]]:
    """What the rank saw, and the mean loss of each step over all sequences."""
    engine = engine_of(run.make_model(), run.ds_config(), folder)
    with watched(engine, []) as seen:
        losses, _ = sequences.steps(engine, run, range(run.num_steps))
    engine.destroy()
    return seen[0], losses


def test_sequences_over_ranks(four_ranks: RankPool, tmp_path: Path) -> None:
    results = four_ranks.run(observed_sequences, RING, tmp_path)
    ranks, losses = [seen for seen, _ in results], results[0][1]
    read = read_events(tmp_path)
    assert [record.step for record in read.steps] == [2, 4]
    for record in read.steps:
        check(record, ranks, RING)
        assert record.loss == pytest.approx(sum(losses[record.step - INTERVAL : record.step]) / INTERVAL, rel=1e-6)
    check_trace(tmp_path, ranks, RING)
    timeline = find_timelines(tmp_path).read(4)
    check_timeline(timeline, 4, 2, RING.accumulation)
    names = [f"model.layers.{number}.self_attn" for number in range(2)]
    for rank in range(4):
        gathers = [span for span in timeline.spans(rank) if span.name == "attention_gather"]
        assert sorted((span.layer, span.phase) for span in gathers) == sorted(
            (name, phase) for name in names for phase in ("forward", "backward") for _ in range(RING.accumulation)
        )
    # Keys and values are no bytes of the MoE layers.
    each = attention_bytes_of_step(RING)
    assert [seen.attention_bytes for seen in ranks] == [each * NUM_STEPS] * 4


def attention_shape(run: Sequences) -> KVShape:
    fields = CONFIGS["qwen3_moe"]
    return KVShape(
        num_ranks=run.sequence_size,
        batch_size=2,
        shard_length=Shards(run.length, run.sequence_size).shard_length,
        num_kv_heads=fields["num_key_value_heads"],
        head_dim=fields["head_dim"],
        value_head_dim=fields["head_dim"],
        value_bytes=4,
    )


def attention_bytes_of_step(run: Sequences) -> int:
    """Keys, values and gradients that leave a rank in both layers, in a ring."""
    shape = attention_shape(run)
    return 2 * run.accumulation * (forward_bytes(shape) + backward_bytes("ring", shape))


def test_records_tell_the_bytes_of_keys_and_values(four_ranks: RankPool, tmp_path: Path) -> None:
    """Of all ranks; and for each batch the position of every token, and whether it is padding, as integers."""
    four_ranks.run(observed_sequences, RING, tmp_path)
    shape = attention_shape(RING)
    metadata = RING.accumulation * (shape.num_ranks - 1) * 2 * shape.batch_size * shape.shard_length * 8
    for record in read_events(tmp_path).steps:
        assert record.attention.wire_bytes == 4 * INTERVAL * (attention_bytes_of_step(RING) + metadata)
        assert record.attention.exposed_seconds > 0


class Plain(nn.Module):
    """No layer of it is a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.out = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.out(self.inp(values).tanh())
        return output


PLAIN = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 1},
    "steps_per_print": 1000000,
}


def observed_plain(folder: Path) -> list[float]:
    engine = engine_of(Plain(), PLAIN, folder)
    losses = []
    for step in range(NUM_STEPS):
        values = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + torch.distributed.get_rank()))
        loss = engine(values).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    return losses


def test_a_model_without_moe_layers(two_ranks: RankPool, tmp_path: Path) -> None:
    losses = np.array(two_ranks.run(observed_plain, tmp_path))
    read = read_events(tmp_path)
    assert (read.runs[0].layers, read.runs[0].expert_groups) == ((), ())
    assert [record.step for record in read.steps] == [2, 4]
    for record in read.steps:
        assert record.loss == pytest.approx(losses[:, record.step - INTERVAL : record.step].mean(), rel=1e-6)
        assert (record.tokens, record.tokens_per_second, record.wire_bytes_per_token) == (0, None, None)
        assert (record.load_max_over_mean, record.lower_bound_ratio, record.layers) == (None, None, ())
        assert record.exposed_fraction == 0
        assert record.samples == record.step * 4 * 2
    timeline = find_timelines(tmp_path).read(4)
    for rank in range(2):
        names = [span.name for span in timeline.spans(rank) if span.layer is None]
        assert [name for name in names if name != "rebalance"] == ["forward", "backward", "optimizer"]
    assert not (tmp_path / PARTS_FOLDER).exists()


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 19, "hysteresis": 1, "loss_scale_window": 1000}}


@pytest.mark.skipif(not get_accelerator().is_fp16_supported(), reason="DeepSpeed has no fp16 on this processor")
def test_steps_whose_gradients_overflow_are_steps(two_ranks: RankPool, tmp_path: Path) -> None:
    """They are routed and exchanged, and what backward was given is a loss all the same; only no weight changes."""
    ranks = two_ranks.run(observed, replace(ZERO, zero_stage=2), tmp_path, FP16)
    assert 0 < ranks[0].num_skipped < NUM_STEPS
    check_run(tmp_path, ranks, ZERO)


class TwoSizes(nn.Module):
    """Two layers with different numbers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = (
            ds_hybrid.MoE(8, lambda: nn.Linear(8, 8), num_experts, ep_size=2, k=2) for num_experts in (4, 8)
        )


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        engine_of(TwoSizes(), PLAIN, folder)
    return str(caught.value)


def test_layers_of_different_sizes_have_no_trace(two_ranks: RankPool, tmp_path: Path) -> None:
    message = (
        "ds_hybrid.observe.routing_trace = true: the model's layers have 4, 8 experts, a trace has one number for "
        "all of them. Set it to false."
    )
    assert two_ranks.run(refused, tmp_path) == [message] * 2
