"""The course of an observed run: what happens between records, at saves and resumes, when a write fails, and clocks."""

from __future__ import annotations

import csv
import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hybrid.dispatch.predict import GroupSpeed
from ds_hybrid.engine import auto_dispatch, routing_counts
from ds_hybrid.observe.events import TimelineRecord
from ds_hybrid.observe.run_directory import find_timelines, read_events
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.trace import PARTS_FOLDER, read_trace
from tests.multirank.test_observe_layouts import PLAIN, Plain
from tests.multirank.test_rebalancing import EAGER
from tests.multirank.training import Run, make_prepared
from tests.multirank.witness import Seen, engine_of, loads_of, train, watched
from tests.ranks import RankPool

RUN = Run(mode="two_stage", accumulation=2, adam=True)
LATE = 1.0
"""Seconds by which a rank comes late: more than a busy machine holds one up, or two clocks differ."""


def make(folder: Path | None, interval: int = 2, run: Run = RUN) -> Any:
    return engine_of(make_prepared(run), run.ds_config(), folder, interval)


class Calls(TorchDispatchMode):
    """Counts collectives, values that are read back from the device, and waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d" or function._opname == "_local_scalar_dense":
            self.counts[function._opname] += 1
        return function(*args, **(kwargs or {}))

    @contextmanager
    def noted(self) -> Iterator[Counter[str]]:
        with pytest.MonkeyPatch.context() as patch, self:
            for owner, name in (
                (Tensor, "tolist"),
                (Tensor, "cpu"),
                (Tensor, "numpy"),
                (type(get_accelerator()), "synchronize"),
            ):
                patch.setattr(owner, name, self._counted(name, getattr(owner, name)))
            yield self.counts

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.counts[name] += 1
            return call(*arguments, **options)

        return counted


def calls_of_steps(folder: Path | None) -> list[Counter[str]]:
    engine, found = make(folder, interval=3), []
    for step in range(7):
        with Calls().noted() as counts:
            train(engine, RUN, range(step, step + 1))
        found.append(counts)
    engine.destroy()
    return found


def test_between_records_nothing_is_exchanged_and_nothing_waits(two_ranks: RankPool, tmp_path: Path) -> None:
    """Step by step as many collectives, values read back and waits as without an observer, of each kind."""
    unseen = two_ranks.run(calls_of_steps, None)
    seen = two_ranks.run(calls_of_steps, tmp_path)
    for rank in range(2):
        assert sum(unseen[rank][0].values()) > 0
        for step in range(7):
            more = seen[rank][step] - unseen[rank][step]
            if step in (2, 5):
                assert more["allreduce_"] >= 1
                assert more["synchronize"] >= 1
            else:
                assert seen[rank][step] == unseen[rank][step], step


def steps_on_disk(folder: Path) -> int:
    return len(read_trace(folder).counts) if (folder / PARTS_FOLDER / "part-000001.npz").exists() else 0


def with_many_pending(folder: Path) -> tuple[Seen, list[int]]:
    """What was seen, and how many steps the files hold after each of seven, and after a save."""
    on_disk = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing_counts, "MOST_PENDING", 3)
        engine = make(folder / "run", interval=100)
        with watched(engine, []) as seen:
            for step in range(7):
                train(engine, RUN, range(step, step + 1))
                dist.barrier()
                on_disk.append(steps_on_disk(folder / "run"))
                dist.barrier()
        engine.save_checkpoint(str(folder / "checkpoints"))
    on_disk.append(steps_on_disk(folder / "run"))
    engine.destroy()
    return seen[0], on_disk


def test_a_trace_is_handed_over_when_many_steps_are_pending_and_at_a_save(two_ranks: RankPool, tmp_path: Path) -> None:
    results = two_ranks.run(with_many_pending, tmp_path)
    assert [on_disk for _, on_disk in results] == [[0, 0, 3, 3, 3, 6, 6, 7]] * 2
    ranks = [seen for seen, _ in results]
    expected = [loads_of(ranks, range(2 * step, 2 * step + 2)) for step in range(7)]
    assert read_trace(tmp_path / "run").counts.tolist() == expected
    assert read_events(tmp_path / "run").steps == ()


class Warnings(logging.Handler):
    """Keeps what is said of observing."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "observe" in message:
            self.messages.append(message)


def losing_its_trace(folder: Path | None) -> tuple[list[float], list[str]]:
    """The losses and the warnings of a run whose trace has nowhere to go after its first record."""
    engine, losses, warnings = make(folder), [], Warnings()
    logger.addHandler(warnings)
    with watched(engine, losses):
        train(engine, RUN, range(3))
        if folder is not None and dist.get_rank() == 0:
            shutil.rmtree(folder / PARTS_FOLDER)
            (folder / PARTS_FOLDER).touch()
        train(engine, RUN, range(3, 7))
    logger.removeHandler(warnings)
    engine.destroy()
    return losses, warnings.messages


def test_a_trace_that_cannot_be_written_does_not_end_the_training(two_ranks: RankPool, tmp_path: Path) -> None:
    seen = two_ranks.run(losing_its_trace, tmp_path)
    unseen = two_ranks.run(losing_its_trace, None)
    assert [losses for losses, _ in seen] == [losses for losses, _ in unseen]
    (warning,) = seen[0][1]
    assert str(tmp_path) in warning
    assert "Nothing more is written there; training goes on." in warning
    assert seen[1][1] == unseen[0][1] == []
    assert [record.step for record in read_events(tmp_path).steps] == [2, 4, 6]  # events and timelines go on too
    assert find_timelines(tmp_path).steps == (2, 4, 6)


def saving_between_records(folder: Path, save: str) -> tuple[Seen, float]:
    """What was seen, and the seconds from the first record to the second, of which ``LATE`` were not spent training."""
    engine = make(folder / "run", interval=4)
    with watched(engine, []) as seen:
        train(engine, RUN, range(4))
        began = time.perf_counter()
        train(engine, RUN, range(4, 6))
        if save == "whole_state_dict":
            engine.whole_state_dict()
        else:
            getattr(engine, save)(str(folder / "checkpoints"))
        time.sleep(LATE)
        train(engine, RUN, range(6, 8))
        seconds = time.perf_counter() - began
    engine.destroy()
    return seen[0], seconds


@pytest.mark.parametrize("save", ["save_checkpoint", "save_16bit_model", "whole_state_dict"])
def test_a_save_between_records_is_no_training(two_ranks: RankPool, tmp_path: Path, save: str) -> None:
    results = two_ranks.run(saving_between_records, tmp_path, save)
    ranks = [seen for seen, _ in results]
    record = read_events(tmp_path / "run").steps[1]
    assert (record.step, record.num_steps, record.samples) == (8, 4, 8 * ranks[0].batch_size)
    losses = [loss for seen in ranks for loss in seen.losses[8:]]
    assert record.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert [list(layer.load) for layer in record.layers] == loads_of(ranks, range(8, 16))
    assert record.seconds < results[0][1] - LATE
    assert record.tokens_per_second == pytest.approx(record.tokens / record.seconds)


def moved_saved_and_loaded(folder: Path) -> Seen:
    """Three steps with a move by a call in between, a save, three more that are lost, and five from the checkpoint."""
    engine = make(folder / "run")
    with watched(engine, []) as seen:
        train(engine, RUN, range(2))
        name, layer = next(iter(engine.moe_layers_by_name().items()))
        swapped = layer.placement.expert_of_slot.copy()
        swapped[0, 0], swapped[1, 0] = swapped[1, 0], swapped[0, 0]
        engine.move_experts({name: ExpertPlacement.from_slots(swapped)})
        train(engine, RUN, range(2, 3))
        engine.save_checkpoint(str(folder / "checkpoints"))
        train(engine, RUN, range(3, 6))
        engine.load_checkpoint(str(folder / "checkpoints"))
        train(engine, RUN, range(3, 8))
    engine.destroy()
    return seen[0]


def test_one_process_moves_saves_and_goes_back(two_ranks: RankPool, tmp_path: Path) -> None:
    ranks = two_ranks.run(moved_saved_and_loaded, tmp_path)
    read = read_events(tmp_path / "run")
    assert (len(read.runs), [record.step for record in read.resumes]) == (1, [3])
    assert [(record.step, record.num_steps) for record in read.steps] == [(2, 2), (4, 1), (6, 2), (8, 2)]
    # The steps that were trained, each of two micro-batches: 0 to 5, then 3 to 7 once more.
    first = {2: 0, 4: 6, 6: 7, 8: 9}
    for record in read.steps:
        calls = range(2 * first[record.step], 2 * (first[record.step] + record.num_steps))
        losses = [seen.losses[call] for seen in ranks for call in calls]
        assert record.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
        assert [list(layer.load) for layer in record.layers] == loads_of(ranks, calls)
    assert [seen.losses[6:12] for seen in ranks] == [seen.losses[12:18] for seen in ranks]
    (move,) = read.rebalances
    placements = {name: placement.expert_of_slot.tolist() for name, placement in ranks[0].placements.items()}
    assert (move.action, move.step, move.num_moved) == ("called", 2, 2)
    for told in (move.placements, read.resumes[0].placements):
        assert told
        assert {name: [list(place) for place in slots] for name, slots in told.items()} == {
            name: placements[name] for name in told
        }
    kept = [*range(3), *range(6, 11)]
    expected = [loads_of(ranks, range(2 * step, 2 * step + 2)) for step in kept]
    assert read_trace(tmp_path / "run").counts.tolist() == expected
    assert find_timelines(tmp_path / "run").steps == (2, 4, 6, 8)


AUTO = Run(mode="auto", ep_size=4)


def deciding(folder: Path) -> dict[str, str]:
    """Twelve steps over links that make every exchange take a second; the dispatchers at the end."""
    document = AUTO.ds_config()
    document["csv_monitor"] = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    document["ds_hybrid"]["rebalance"] = EAGER
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_dispatch, "measure_link", lambda _group: GroupSpeed(latency=1.0, bandwidth=1e12))
        engine = engine_of(make_prepared(AUTO), document, folder)
        train(engine, AUTO, range(12))
    modes = {name: layer.dispatcher.mode for name, layer in engine.moe_layers_by_name().items()}
    engine.destroy()
    return modes


def test_changed_dispatchers_and_measured_gains_are_told(four_ranks: RankPool, tmp_path: Path) -> None:
    modes = four_ranks.run(deciding, tmp_path)[0]
    read = read_events(tmp_path)
    begun = {layer.name: layer.mode for layer in read.runs[0].layers}
    assert [(change.step, change.layer) for change in read.dispatchers] == [(1, name) for name in begun]
    for change in read.dispatchers:
        assert (change.before, change.after) == (begun[change.layer], modes[change.layer])
        assert change.predicted_seconds[change.after] == min(change.predicted_seconds.values())
        assert change.predicted_seconds == pytest.approx({"alltoall": 5.0, "allgather": 8.0, "two_stage": 6.0})
    assert {layer.name: layer.mode for layer in read.steps[-1].layers} == modes
    with (tmp_path / "job" / "Train_Samples_moe_dispatcher_changes.csv").open() as file:
        _, *shown = csv.reader(file)
    samples_per_step = read.steps[0].samples // read.steps[0].step
    assert [(int(samples), float(number)) for samples, number in shown] == [(samples_per_step, len(begun))]
    moves = {record.step: record for record in read.rebalances if record.action == "moved"}
    assert moves
    # What moved is measured at the next look.
    moved = {(name, step) for step, record in moves.items() for name in record.placements if step < 12}
    assert moved
    assert {(gain.layer, gain.moved_at) for gain in read.gains} == moved
    for gain in read.gains:
        (decision,) = [one for one in moves[gain.moved_at].decisions if one.layer == gain.layer]
        assert (gain.predicted, gain.step) == (decision.predicted_gain, gain.moved_at + EAGER["interval"])


def on_clocks_of_their_own(folder: Path, has_moe_layers: bool) -> None:
    """Rank 1 has another clock, as on another host.

    In the second step it begins when rank 0 has begun, is slow, and comes to the record later than all that together.
    """
    is_late = dist.get_rank() == 1
    clock = time.perf_counter
    with pytest.MonkeyPatch.context() as patch:
        if is_late:
            patch.setattr(time, "perf_counter", lambda: clock() + 1000)
        run = replace(RUN, accumulation=1)
        engine = make(folder, run=run) if has_moe_layers else engine_of(Plain(), PLAIN, folder)
        parts = [layer.router for layer in engine.moe_layers_by_name().values()] or [engine.module.inp]
        after_step = engine._observer.after_step

        def has_begun(_module: Any, _arguments: Any) -> None:
            if engine.global_steps == 1:
                dist.barrier()

        def slow(_module: Any, _arguments: Any, _output: Any) -> None:
            time.sleep(LATE if engine.global_steps == 1 else 0)

        def after_step_late(*arguments: Any) -> None:
            time.sleep((len(parts) + 2) * LATE if engine.global_steps == 2 else 0)
            after_step(*arguments)

        if is_late:
            engine._observer.after_step = after_step_late
            for part in parts:
                part.register_forward_hook(slow)
        else:
            engine.module.register_forward_pre_hook(has_begun)
        for step in range(2):
            dist.barrier()
            if is_late and step == 1:
                dist.barrier()
                time.sleep(LATE)
            if has_moe_layers:
                train(engine, run, range(step, step + 1))
            else:
                engine.backward(engine(torch.ones(4, 8)).square().mean())
                engine.step()
        engine.destroy()


@pytest.mark.parametrize("has_moe_layers", [pytest.param(True, id="moe"), pytest.param(False, id="plain")])
def test_ranks_are_on_one_clock(two_ranks: RankPool, tmp_path: Path, has_moe_layers: bool) -> None:
    two_ranks.run(on_clocks_of_their_own, tmp_path, has_moe_layers)
    timeline = find_timelines(tmp_path).read(2)
    punctual, late = (forward_and_optimizer(timeline, rank) for rank in range(2))
    assert punctual[0] < late[0] < punctual[1]  # rank 0 ends when it has the late rank's gradients
    for layer in timeline.layers:
        arrived, sent = (
            [span for span in timeline.spans(rank) if (span.layer, span.name, span.phase) == (layer, name, "forward")]
            for rank, name in ((0, "experts"), (1, "router"))
        )
        assert arrived[0].start > sent[0].start
    assert min(span.start for rank in range(2) for span in timeline.spans(rank)) == 0


def forward_and_optimizer(timeline: TimelineRecord, rank: int) -> tuple[float, float]:
    """When the rank's forward begins and its optimizer ends."""
    forward, optimizer = (
        next(span for span in timeline.spans(rank) if span.name == name and span.layer is None)
        for name in ("forward", "optimizer")
    )
    return forward.start, optimizer.start + optimizer.seconds
