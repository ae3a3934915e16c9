"""A run writes down what it did: against the routers' own choices, the formulas of traffic, and what was trained."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ds_hybrid
from ds_hybrid.attention.hugging_face import silent
from ds_hybrid.dispatch.meter import Meter, WireBytes
from ds_hybrid.dispatch.traffic import backward_traffic, forward_traffic
from ds_hybrid.engine import observer
from ds_hybrid.errors import ConfigError
from ds_hybrid.observe.events import StepRecord
from ds_hybrid.observe.run_directory import find_timelines, read_events
from ds_hybrid.observe.writer import RecordWriter
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.trace import read_trace
from tests.multirank import explicit, witness
from tests.multirank.sequences import Sequences, make_engine, steps
from tests.multirank.test_moving_experts import loss_of
from tests.multirank.test_rebalancing import EAGER
from tests.multirank.training import Run, make_prepared
from tests.multirank.witness import Seen, loads_of, watched
from tests.ranks import RankPool

QWEN = Run(mode="two_stage", accumulation=2, adam=True)
MIXTRAL = Run("mixtral", mode="alltoall", ep_size=4, overlap_chunks=2, checkpointing=True)
EXPLICIT = explicit.Setup(accumulation=2, dispatch={"mode": "two_stage"}, lengths=(6, 5, 0, 3))
NUM_STEPS, INTERVAL = 5, 2
RUNS = pytest.mark.parametrize("run", [QWEN, MIXTRAL, EXPLICIT], ids=["qwen3_moe", "mixtral", "explicit"])


def engine_of(run: Run | explicit.Setup, options: dict[str, Any], config: dict[str, Any] | None = None) -> Any:
    """With ``options`` in the ds_hybrid section, and ``config`` beside it."""
    model: Any = make_prepared(run) if isinstance(run, Run) else explicit.Toy(run)
    document = run.ds_config() | (config or {})
    document["ds_hybrid"] = document["ds_hybrid"] | options
    return ds_hybrid.initialize(model=model, model_parameters=list(model.parameters()), config=document)[0]


def train(engine: Any, run: Run | explicit.Setup, steps: range) -> Seen:
    """Each step is followed by an evaluation, on other data. Ends the engine."""
    with watched(engine, []) as seen:
        for step in steps:
            witness.train(engine, run, range(step, step + 1))
            engine.eval()
            with torch.no_grad():
                loss_of(engine, run, step + 100, 0)
            engine.train()
    engine.destroy()
    return seen[0]


def observed(
    run: Run | explicit.Setup,
    options: dict[str, Any],
    config: dict[str, Any] | None = None,
    num_steps: int = NUM_STEPS,
) -> Seen:
    return train(engine_of(run, options, config), run, range(num_steps))


def observe(folder: Path, **options: Any) -> dict[str, Any]:
    return {"observe": {"directory": str(folder), "interval": INTERVAL, **options}}


@RUNS
def test_records_agree_with_what_was_routed_sent_and_learnt(
    four_ranks: RankPool, tmp_path: Path, run: Run | explicit.Setup
) -> None:
    ranks = four_ranks.run(observed, run, observe(tmp_path, routing_trace=True))
    read = read_events(tmp_path)
    assert read.warnings == ()
    assert [record.step for record in read.steps] == [2, 4]
    for record in read.steps:
        check_step(record, ranks, run)
    (begun,) = read.runs
    assert [layer.name for layer in begun.layers] == list(ranks[0].shapes)
    assert begun.world_size == len(begun.node_of_rank) == 4
    (groups,) = begun.expert_groups
    assert [list(group) for group in groups.ep_groups] == ranks[0].groups
    assert sorted(rank for group in groups.edp_groups for rank in group) == [0, 1, 2, 3]
    assert begun.ds_config["ds_hybrid"]["observe"]["directory"] == str(tmp_path)
    assert begun.versions["torch"] == version("torch")
    assert [seen.num_gathered for seen in ranks] == [2] * 4
    # The trace has each step for itself; those after the last interval were not handed over.
    assert read_trace(tmp_path).counts.tolist() == [loads_of(ranks, calls_of(run, [step])) for step in range(4)]


def check_step(record: StepRecord, ranks: list[Seen], run: Run | explicit.Setup) -> None:
    calls = calls_of(run, range(record.step - INTERVAL, record.step))
    losses = [seen.losses[call] for seen in ranks for call in calls]
    assert record.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert (record.num_steps, record.samples) == (INTERVAL, record.step * samples_per_step(run))
    assert all(value > 1e6 for value in record.host_memory)
    assert record.accelerator_memory is None
    assert record.tokens_per_second == pytest.approx(record.tokens / record.seconds)
    assert 0 < record.exposed_fraction < 1
    sent = sum(sum(layer.wire_bytes.values()) for layer in record.layers)
    assert record.wire_bytes_per_token == pytest.approx(sent / record.tokens)
    loads = loads_of(ranks, calls)
    for number, layer in enumerate(record.layers):
        shape, placement = ranks[0].shapes[layer.name], ranks[0].placements[layer.name]
        load = np.array(loads[number])
        assert layer.load == tuple(load)
        assert layer.load_max_over_mean == pytest.approx(load.max() / load.mean())
        assert layer.rank_load == tuple(load[placement.expert_of_slot].sum(1))
        assert record.tokens == load.sum() // shape.top_k
        wire, bound = bytes_of(ranks, layer.name, number, calls, run)
        assert (layer.wire_bytes, layer.lower_bound) == ({layer.mode: wire}, bound)
        assert layer.lower_bound_ratio == pytest.approx(wire / bound)
        assert len(layer.expert_seconds) == len(layer.arrived) == shape.num_ranks
        assert layer.exposed_seconds > 0


def calls_of(run: Run | explicit.Setup, steps: Iterable[int]) -> list[int]:
    """The micro-batches of some steps, counted from the first step on."""
    return [step * run.accumulation + micro for step in steps for micro in range(run.accumulation)]


def samples_per_step(run: Run | explicit.Setup) -> int:
    return int(run.ds_config()["train_micro_batch_size_per_gpu"] * run.accumulation * 4)


def bytes_of(
    ranks: list[Seen], layer: str, number: int, calls: list[int], run: Run | explicit.Setup
) -> tuple[int, int]:
    """By the formulas, from each call's choices: all bytes, and those that had to cross."""
    shape, rank_of = ranks[0].shapes[layer], ranks[0].placements[layer].rank_of_expert
    num_chunks = run.overlap_chunks if isinstance(run, Run) else 1
    mode = run.mode if isinstance(run, Run) else "two_stage"
    is_repeated = isinstance(run, Run) and run.checkpointing is not None
    wire = bound = 0
    for group in ranks[0].groups:
        for call in calls:
            choices = [rank_of[ranks[rank].ids[number][call]] for rank in group]
            for chunk in zip(*(np.array_split(choice, num_chunks) for choice in choices), strict=True):
                forward = forward_traffic(mode, chunk, shape)
                backward = backward_traffic(mode, chunk, shape)
                for traffic, times in ((forward, 2 if is_repeated else 1), (backward, 1)):
                    wire += times * int((traffic.payload + traffic.metadata).sum())
                    bound += times * int(traffic.lower_bound.sum())
    return wire, bound


def test_nobody_notices_being_observed(four_ranks: RankPool, tmp_path: Path) -> None:
    seen = four_ranks.run(observed, QWEN, observe(tmp_path, interval=1, routing_trace=True))
    unseen = four_ranks.run(observed, QWEN, {})
    assert [seen.losses for seen in seen] == [seen.losses for seen in unseen]
    assert [seen.num_gathered for seen in seen + unseen] == [NUM_STEPS] * 4 + [0] * 4


def test_monitors_get_the_same_figures_over_samples(four_ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitors = {
        name: {"enabled": True, "output_path": str(tmp_path / name), "job_name": "job"}
        for name in ("csv_monitor", "tensorboard")
    }
    four_ranks.run(observed, QWEN, observe(tmp_path), monitors)
    steps = read_events(tmp_path).steps
    board = EventAccumulator(str(tmp_path / "tensorboard" / "job"))
    board.Reload()
    for name, field in (
        ("train_loss", "loss"),
        *[(f"moe_{f}", f) for f in ("load_max_over_mean", "lower_bound_ratio")],
    ):
        expected = [(record.samples, getattr(record, field)) for record in steps]
        with (tmp_path / "csv_monitor" / "job" / f"Train_Samples_{name}.csv").open() as file:
            header, *rows = csv.reader(file)
        assert header == ["step", name]
        assert [(int(step), float(value)) for step, value in rows] == expected
        scalars = board.Scalars(f"Train/Samples/{name}")
        assert [scalar.step for scalar in scalars] == [samples for samples, _ in expected]
        assert [scalar.value for scalar in scalars] == pytest.approx([value for _, value in expected], rel=1e-6)
    assert f"Train/Samples/moe_load_entropy/{steps[0].layers[0].name}" in board.Tags()["scalars"]


def test_monitors_alone_need_no_directory(two_ranks: RankPool, tmp_path: Path) -> None:
    monitors = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    ranks = two_ranks.run(observed, QWEN, {"observe": {"interval": 5}}, monitors)
    assert [seen.num_gathered for seen in ranks] == [1, 1]
    with (tmp_path / "job" / "Train_Samples_train_loss.csv").open() as file:
        _, (samples, loss) = csv.reader(file)
    assert int(samples) == 5 * 2 * 2 * 2
    losses = [loss for seen in ranks for loss in seen.losses]
    assert float(loss) == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.mark.parametrize("run", [replace(MIXTRAL, accumulation=2), QWEN, EXPLICIT], ids=["chunks", "plain", "explicit"])
def test_timelines_show_every_work_of_every_rank(
    four_ranks: RankPool, tmp_path: Path, run: Run | explicit.Setup
) -> None:
    four_ranks.run(observed, run, observe(tmp_path))
    found = find_timelines(tmp_path)
    assert found.steps == (2, 4)
    timeline = found.read(4)
    is_repeated = isinstance(run, Run) and run.checkpointing is not None
    num_chunks = run.overlap_chunks if isinstance(run, Run) else 1
    num_layers = len(timeline.layers)
    assert len(timeline.ranks) == 4
    for rank in range(4):
        spans = timeline.spans(rank)
        forwards = [span for span in spans if span.layer is None and span.name == "forward"]
        (optimizer,) = [span for span in spans if span.name == "optimizer"]
        backwards = [span for span in spans if span.layer is None and span.name == "backward"]
        assert len(forwards) == len(backwards) == run.accumulation
        assert all(one.start + one.seconds <= other.start for one, other in zip(forwards, backwards, strict=True))
        assert all(span.start + span.seconds <= optimizer.start for span in backwards)
        for name, each in (("router", 1), ("plan", 1), ("experts", num_chunks)):
            of_name = [span for span in spans if span.name == name]
            for phase, times in (("forward", 1), ("recompute", int(is_repeated))):
                of_phase = [span for span in of_name if span.phase == phase]
                assert len(of_phase) == times * each * num_layers * run.accumulation, (name, phase)
        for span in spans:  # evaluation is left out, and every work is inside a pass of the model
            outer = forwards if span.phase == "forward" else backwards
            if span.layer is not None:
                assert any(
                    whole.start - 2e-6 <= span.start and span.start + span.seconds <= whole.start + whole.seconds + 2e-6
                    for whole in outer
                ), span
            assert span.exposed <= span.seconds + 2e-6
        for name in ("combine", "experts", "dispatch"):
            of_name = [span for span in spans if span.name == name and span.phase == "backward"]
            assert len(of_name) == num_chunks * num_layers * run.accumulation, name
        assert sum(span.seconds for span in spans if span.name == "wait") > 0
        whole = [span for span in spans if span.layer is None]
        waits = sum(span.seconds for span in spans if span.name == "wait")
        assert sum(span.exposed for span in whole) == pytest.approx(waits, abs=1e-4)


def test_timelines_can_be_left_out(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(observed, QWEN, observe(tmp_path, timeline=False))
    assert find_timelines(tmp_path).steps == ()
    assert len(read_events(tmp_path).steps) == 2


def test_moves_and_what_came_of_them_are_told(four_ranks: RankPool, tmp_path: Path) -> None:
    options = observe(tmp_path) | {"rebalance": EAGER}
    monitors = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    ranks = four_ranks.run(observed, QWEN, options, monitors, 12)
    read = read_events(tmp_path)
    moves = [record for record in read.rebalances if record.action == "moved"]
    assert moves
    assert {record.step % 3 for record in read.rebalances} == {0}
    placements = {layer.name: layer.expert_of_slot for layer in read.runs[0].layers}
    for record in moves:
        assert record.num_moved == sum(
            sum(len(set(old) - set(new)) for old, new in zip(placements[name], slots, strict=True))
            for name, slots in record.placements.items()
        )
        assert record.seconds > 0
        assert record.bytes_sent > 0
        paying = {decision.layer for decision in record.decisions if decision.pays}
        assert paying == set(record.placements)
        placements |= record.placements
    assert placements == {
        name: tuple(map(tuple, placement.expert_of_slot.tolist())) for name, placement in ranks[0].placements.items()
    }
    for gain in read.gains:
        move = next(record for record in moves if record.step == gain.moved_at)
        (decision,) = [decision for decision in move.decisions if decision.layer == gain.layer]
        assert gain.predicted == decision.predicted_gain

    def shown(name: str) -> list[tuple[int, float]]:
        with (tmp_path / "job" / f"Train_Samples_{name}.csv").open() as file:
            return [(int(samples), float(value)) for samples, value in list(csv.reader(file))[1:]]

    samples = samples_per_step(QWEN)
    assert shown("moe_experts_moved") == [(record.step * samples, record.num_moved) for record in moves]
    assert shown("moe_rebalance_predicted_gain") == [
        (record.step * samples, pytest.approx(sum(each.predicted_gain for each in record.decisions if each.pays)))
        for record in moves
    ]
    at = sorted({gain.step for gain in read.gains})
    assert shown("moe_rebalance_measured_gain") == [
        (step * samples, pytest.approx(sum(gain.measured for gain in read.gains if gain.step == step))) for step in at
    ]


def moved_by_call(folder: Path) -> None:
    engine = engine_of(QWEN, observe(folder))
    name, layer = next(iter(engine.moe_layers_by_name().items()))
    swapped = layer.placement.expert_of_slot.copy()
    swapped[0, 0], swapped[1, 0] = swapped[1, 0], swapped[0, 0]
    engine.move_experts({name: ExpertPlacement.from_slots(swapped)})
    train(engine, QWEN, range(2))


def test_moves_by_a_call_are_told(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(moved_by_call, tmp_path)
    read = read_events(tmp_path)
    (record,) = read.rebalances
    assert (record.action, record.step, record.num_moved) == ("called", 0, 2)
    (slots,) = record.placements.values()
    assert [sorted(place) for place in slots] == [[1, 2, 3, 4], [0, 5, 6, 7]]
    (layer, _) = read.steps[0].layers
    assert layer.rank_load == tuple(sum(layer.load[expert] for expert in place) for place in slots)


def interrupted(folder: Path) -> list[Seen]:
    """Six steps, saved after the third; then from there once more, and on to the eighth. Two timelines a start."""
    options = observe(folder / "run", routing_trace=True)
    engine = engine_of(QWEN, options)
    saved, destroy = folder / "checkpoints", engine.destroy
    engine.destroy = lambda: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observer, "is_kept", lambda number: number <= 2)
        first = train(engine, QWEN, range(3))
        engine.save_checkpoint(str(saved))
        lost = train(engine, QWEN, range(3, 6))
        destroy()
        engine = engine_of(QWEN, options)
        engine.load_checkpoint(str(saved))
        return [first, lost, train(engine, QWEN, range(3, 8))]


def test_a_resumed_run_appends_and_counts_each_step_once(two_ranks: RankPool, tmp_path: Path) -> None:
    parts = list(zip(*two_ranks.run(interrupted, tmp_path), strict=True))  # by part, of both ranks
    first, _, second = parts
    read = read_events(tmp_path / "run")
    assert [record.step for record in read.steps] == [2, 4, 6, 8]
    assert (len(read.runs), [record.step for record in read.resumes]) == (2, [3])
    assert [record.num_steps for record in read.steps] == [2, 1, 2, 2]
    losses = [seen.losses[call] for seen in second for call in calls_of(QWEN, (1, 2))]
    assert read.steps[2].loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    counts = [loads_of(list(first), calls_of(QWEN, [step])) for step in range(3)]
    counts += [loads_of(list(second), calls_of(QWEN, [step])) for step in range(5)]
    assert read_trace(tmp_path / "run").counts.tolist() == counts
    assert find_timelines(tmp_path / "run").steps == (2, 4, 6)  # of the second start the first two: 4, 6


def refused(options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        engine_of(QWEN, options)
    return str(caught.value)


def test_a_directory_that_cannot_be_written_is_one_error_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    messages = two_ranks.run(refused, observe(tmp_path / "file" / "run"))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f'rank 0: ds_hybrid.observe.directory = "{tmp_path}/file/run": Not a directory')


def observed_on_a_full_disk(folder: Path) -> Seen:
    def full(self: RecordWriter, record: Any) -> None:
        raise OSError(28, "No space left on device")

    engine = engine_of(QWEN, observe(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordWriter, "write", full)
        return train(engine, QWEN, range(NUM_STEPS))


def test_a_disk_that_is_full_does_not_end_the_training(two_ranks: RankPool, tmp_path: Path) -> None:
    full = two_ranks.run(observed_on_a_full_disk, tmp_path)
    unseen = two_ranks.run(observed, QWEN, {})
    assert [seen.losses for seen in full] == [seen.losses for seen in unseen]
    assert len(read_events(tmp_path).records) == 1


def test_timelines_show_exchanges_of_keys_and_values(two_ranks: RankPool, tmp_path: Path) -> None:
    run = Sequences(kv_gather="ring", num_steps=2)
    hybrid = {**run.ds_config()["ds_hybrid"], "observe": {"directory": str(tmp_path), "interval": 2}}
    totals = two_ranks.run(sent_by_attention, replace(run, changes={"ds_hybrid": hybrid}))
    assert [set(total.by_mode) for total in totals] == [{"kv_gather"}] * 2
    (record,) = read_events(tmp_path).steps
    assert record.attention is not None
    assert record.attention.wire_bytes == sum(total.payload + total.metadata for total in totals) > 0
    exposed = sum(total.exposed_seconds for total in totals)
    assert record.attention.exposed_seconds == pytest.approx(exposed)
    assert record.attention.exposed_fraction == pytest.approx(exposed / (2 * record.seconds))
    timeline = find_timelines(tmp_path).read(2)
    names = [f"model.layers.{number}.self_attn" for number in range(2)]
    assert list(timeline.layers[-2:]) == names
    for rank in range(2):
        spans = timeline.spans(rank)
        gathers = [span for span in spans if span.name == "attention_gather"]
        expected = [(name, phase) for name in names for phase in ("backward", "forward")]
        assert sorted((span.layer, span.phase) for span in gathers) == expected
        waits = [span for span in spans if span.name == "wait"]
        for gather in gathers:
            inside = [span.seconds for span in waits if span.layer == gather.layer and span.phase == gather.phase]
            assert inside
            assert gather.exposed == pytest.approx(sum(inside), abs=1e-5)


def sent_by_attention(run: Sequences) -> WireBytes:
    engine = make_engine(run)
    meter: Meter = engine.sequence_parallel.attention.group.meter
    before = meter.total()  # links were measured
    steps(engine, run, range(run.num_steps))
    engine.destroy()
    assert engine.sequence_parallel.shared.spans_of is silent
    return meter.total().since(before)
