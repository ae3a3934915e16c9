"""What goes wrong on rank 0 alone while it writes down a run: the other ranks are told, or notice nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_hybrid.dispatch.spans import Spans
from ds_hybrid.engine import engine as engine_module
from ds_hybrid.engine import observer
from ds_hybrid.observe.run_directory import find_timelines, read_events
from ds_hybrid.observe.writer import RecordWriter
from ds_hybrid.rebalance.trace import PARTS_FOLDER, read_trace
from tests.multirank.test_moving_experts import loss_of
from tests.multirank.test_observer import QWEN, engine_of, observe, observed, refused, train
from tests.ranks import RankPool

NUM_STEPS = 4


def failing(*_args: Any, **_options: Any) -> Any:
    raise ValueError("of rank 0 alone")


def begun_twice(folder: Path) -> tuple[str, list[float]]:
    """A student and a teacher of one ds_config; then the teacher again, when the student has ended."""
    student = engine_of(QWEN, observe(folder))
    message = refused(observe(folder))
    losses = train(student, QWEN, range(2)).losses
    train(engine_of(QWEN, observe(folder)), QWEN, range(2))
    return message, losses


def test_a_directory_is_one_engines(two_ranks: RankPool, tmp_path: Path) -> None:
    told = two_ranks.run(begun_twice, tmp_path)
    expected = f'rank 0: ds_hybrid.observe.directory = "{tmp_path}": another engine writes there now. '
    assert [message.startswith(expected) for message, _ in told] == [True, True]
    assert told[0][0] == told[1][0]
    assert [record.step for record in read_events(tmp_path).steps] == [2]


def refused_a_description(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "run_record", failing)
        message = refused(observe(folder))
    engine_of(QWEN, observe(folder)).destroy()  # the directory is free again
    return message


def test_a_run_without_a_description_is_one_error_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    (message, same) = two_ranks.run(refused_a_description, tmp_path)
    assert message == same
    assert message == (
        f'rank 0: ds_hybrid.observe.directory = "{tmp_path}": the run has no description: '
        "ValueError: of rank 0 alone. Set it to null."
    )


def losses_with(folder: Path, fault: str) -> list[float]:
    monitors = {"csv_monitor": {"enabled": True, "output_path": str(folder / "csv"), "job_name": "job"}}
    engine = engine_of(QWEN, observe(folder / "run", routing_trace=True), monitors)
    with pytest.MonkeyPatch.context() as patch:
        if fault == "record":
            patch.setattr(observer, "step_record", failing)
        elif fault == "monitor":
            patch.setattr(observer, "monitor_events", failing)
        elif fault == "trace":
            patch.setattr(observer.RoutingTraceWriter, "append", failing)
        return train(engine, QWEN, range(NUM_STEPS)).losses


@pytest.mark.parametrize(("fault", "is_written", "is_shown"), [("record", 0, 0), ("monitor", 2, 0), ("trace", 2, 1)])
def test_what_cannot_be_written_or_shown_does_not_end_the_training(
    two_ranks: RankPool, tmp_path: Path, fault: str, is_written: int, is_shown: int
) -> None:
    losses = two_ranks.run(losses_with, tmp_path, fault)
    assert losses == [seen.losses for seen in two_ranks.run(observed, QWEN, {}, None, NUM_STEPS)]
    assert len(read_events(tmp_path / "run").steps) == is_written
    assert (tmp_path / "csv" / "job" / "Train_Samples_train_loss.csv").exists() == bool(is_shown)


def ended_once(folder: Path) -> tuple[bool, bool]:
    """Whether an engine without an observer ends as DeepSpeed's, and a second end of one leaves its layers alone."""
    made: list[Any] = []

    def refuse(self: Any, _layers: Any) -> Any:
        made.append(self)
        return failing()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module.MoEEngine, "_make_observer", refuse)
        with pytest.raises(ValueError, match="of rank 0 alone"):
            engine_of(QWEN, observe(folder))
    ended: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedEngine, "destroy", lambda engine: ended.append(engine))
        made[0].destroy()
    made[0].destroy()
    engine = engine_of(QWEN, observe(folder))
    layer = next(iter(engine.moe_layers_by_name().values()))
    engine.destroy()
    layer.meter.watched_by = of_another_engine = Spans()
    engine.destroy()
    return ended == made, layer.meter.watched_by is of_another_engine


def test_an_engine_ends_once_whether_it_was_made_or_not(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(ended_once, tmp_path) == [(True, True)] * 2


def test_files_of_others_beside_a_trace_are_no_parts_of_it(two_ranks: RankPool, tmp_path: Path) -> None:
    stray = tmp_path / PARTS_FOLDER / "part-x.npz"
    stray.parent.mkdir()
    stray.touch()
    two_ranks.run(observed, QWEN, observe(tmp_path, routing_trace=True), None, 2)
    assert sorted(path.name for path in stray.parent.iterdir()) == ["part-000001.npz", "part-x.npz"]
    assert read_trace(tmp_path).counts.shape[0] == 2


def times_of_writing(folder: Path) -> tuple[list[float], list[float]]:
    """When rank 0 had written a record; when this rank began the next window."""
    engine = engine_of(QWEN, observe(folder, interval=1))
    written, begun = [], []
    begin, write = observer.Observer._begin_window, RecordWriter.write

    def slow(self: RecordWriter, record: Any) -> None:
        time.sleep(0.2)
        write(self, record)
        written.append(time.monotonic())

    def noted(self: observer.Observer, **options: Any) -> None:
        begun.append(time.monotonic())
        begin(self, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordWriter, "write", slow)
        patch.setattr(observer.Observer, "_begin_window", noted)
        train(engine, QWEN, range(2))
    return written, begun


def test_nobody_waits_in_the_next_window_for_what_rank_0_writes(two_ranks: RankPool, tmp_path: Path) -> None:
    """The two ranks are on one host: their monotonic clocks are one."""
    (written, _), (nothing, begun) = two_ranks.run(times_of_writing, tmp_path)
    assert (len(written), len(nothing), len(begun)) == (4, 0, 2)  # a step record and a timeline each
    assert written[1] <= begun[0] <= written[2] < written[3] <= begun[1]
    assert find_timelines(tmp_path).steps == (1, 2)


def losses_of_one_element(folder: Path) -> str:
    engine = engine_of(QWEN, observe(folder, interval=1))
    for micro, shape in enumerate([(), (1,)]):
        engine.backward(loss_of(engine, QWEN, 0, micro).reshape(shape))
        engine.step()
    for micro in range(2):  # as the Trainer hands it over
        engine.backward(loss_of(engine, QWEN, 1, micro) / 2, scale_wrt_gas=False)
        engine.step()
    loss = loss_of(engine, QWEN, 2, 0)
    with pytest.raises(AssertionError) as caught:
        engine.backward(loss.expand(2))
    engine.destroy()
    return str(caught.value)


def test_a_loss_of_one_element_may_have_any_shape_and_others_are_deepspeeds_to_refuse(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    messages = two_ranks.run(losses_of_one_element, tmp_path)
    assert all("loss must be a scalar tensor" in message for message in messages)
    one, other = two_ranks.run(observed, QWEN, {}, None, 2)
    means = [sum(one.losses[call : call + 2] + other.losses[call : call + 2]) / 4 for call in (0, 2)]
    assert [record.loss for record in read_events(tmp_path).steps] == pytest.approx(means, rel=1e-6)


def loads_around_moves(folder: Path) -> None:
    """Intervals of three steps; experts 0 and 4 change places after the first and after the fifth."""
    engine = engine_of(QWEN, observe(folder, interval=3))
    name, layer = next(iter(engine.moe_layers_by_name().items()))
    for step in range(6):
        for micro in range(QWEN.accumulation):
            engine.backward(loss_of(engine, QWEN, step, micro))
            engine.step()
        if step in (0, 4):
            swapped = layer.placement.expert_of_slot.copy()
            swapped[0, 0], swapped[1, 0] = swapped[1, 0], swapped[0, 0]
            engine.move_experts({name: type(layer.placement).from_slots(swapped)})
    engine.destroy()


def test_loads_of_ranks_are_by_where_experts_were_longest(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(loads_around_moves, tmp_path)
    events = read_events(tmp_path)
    first, second = events.steps
    assert [record.step for record in events.rebalances] == [1, 5]
    for record in (first, second):  # moved back only after the fifth step
        layer = record.layers[0]
        assert layer.rank_load == tuple(sum(layer.load[e] for e in place) for place in ((4, 1, 2, 3), (0, 5, 6, 7)))
