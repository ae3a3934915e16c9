"""From records to what the report shows: every figure worked out by hand or by other means."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds_hybrid.observe.events import (
    AttentionStep,
    DispatcherRecord,
    ExpertGroups,
    GainRecord,
    Record,
    ResumeRecord,
    RunRecord,
)
from ds_hybrid.observe.report.charts import drawn_ranks, heatmap_columns
from ds_hybrid.observe.report.digest import headline, settled, view_of
from ds_hybrid.observe.report.page import page
from ds_hybrid.observe.report.placements import LayerHistory, Placed, Slots, histories
from ds_hybrid.observe.report.view import Advice, RunView
from ds_hybrid.observe.run_directory import RunEvents, read_events
from ds_hybrid.observe.timeline import Timed, span_columns
from ds_hybrid.observe.timeline import timeline_record as made_timeline
from tests.observe.runs import (
    AT_FIRST,
    BEGAN,
    LAYERS,
    MOVED,
    all_events,
    decision,
    rebalance_record,
    run_record,
    step_record,
    timeline_record,
    write_run,
)

ON_FOUR = ((0, 1), (2, 3), (4, 5), (6, 7))
RUN = run_record()


def rank_spread(load: npt.ArrayLike, slots: Slots) -> float:
    of_ranks = [sum(np.asarray(load)[list(held)]) for held in slots]
    return max(of_ranks) / (sum(of_ranks) / len(of_ranks))


def view(*records: Record, step: int | None = None) -> RunView:
    timeline = None if step is None else timeline_record(step)
    return view_of(
        settled(RunEvents(records)), name="run", timeline=timeline, timeline_steps=() if step is None else (step,)
    )


def titles(*records: Record, step: int | None = None) -> list[str]:
    return [each.title for each in view(*records, step=step).advice]


def configured(**sections: Any) -> dict[str, Any]:
    return {"tensorboard": {"enabled": True}, "ds_hybrid": sections}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    events = read_events(write_run(tmp_path_factory.mktemp("run")))
    return view_of(settled(events), name="run", timeline=timeline_record(60), timeline_steps=(50, 60))


def test_lines(whole: RunView) -> None:
    (loss,), (memory,) = whole.lines["loss"], whole.lines["memory"]
    assert loss.steps == (10, 20, 30, 40, 50, 60)
    assert loss.values == tuple(step_record(step).loss for step in loss.steps)
    assert set(memory.values) == {910_000_000.0}
    assert "nvlink" not in whole.lines


def test_layers(whole: RunView) -> None:
    first, second = whole.layers
    assert (first.first_slots, first.last_slots, first.group, first.num_groups) == (AT_FIRST, MOVED, (0, 1), 2)
    for place, step in enumerate(first.steps):
        load = np.array(step_record(step).layers[0].load)
        slots = AT_FIRST if step <= 30 else MOVED
        assert first.rank_spread[place] == pytest.approx(max(load[list(held)].sum() for held in slots) * 2 / load.sum())
        assert first.relative_loads[place] == pytest.approx(load * 8 / load.sum())
    assert first.wire.ratio == pytest.approx(900 / 850)
    assert first.wire.bytes_per_token == pytest.approx(900_000 / 2560)
    assert second.wire.by_mode == {"two_stage": 1_800_000, "allgather": 4_200_000}
    assert [mark.kind for mark in second.marks] == ["dispatcher"]


def test_rebalances_are_measured_by_the_records_on_both_sides(whole: RunView) -> None:
    (row,) = whole.rebalances
    before = [rank_spread(step_record(step).layers[0].load, AT_FIRST) for step in (10, 20, 30)]
    after = [rank_spread(step_record(step).layers[0].load, MOVED) for step in (40, 50, 60)]
    assert (row.step, row.layer, row.outcome, row.num_moved) == (30, LAYERS[0], "moved", 2)
    assert row.measured_before == pytest.approx(np.mean(before))
    assert row.measured_after == pytest.approx(np.mean(after))
    assert (row.predicted_gain, row.measured_gain) == (0.004, 0.0036)
    assert whole.num_looks == 2


def test_a_record_that_a_move_cuts_is_on_neither_side() -> None:
    moved = rebalance_record(step=25)
    (row,) = view(run_record(), step_record(10), step_record(20), moved, step_record(30), step_record(40)).rebalances
    before = [rank_spread(step_record(step).layers[0].load, AT_FIRST) for step in (10, 20)]
    assert row.measured_before == pytest.approx(np.mean(before))
    assert row.measured_after == pytest.approx(rank_spread(step_record(40).layers[0].load, MOVED))


def test_moves_by_a_call_are_counted_from_placements() -> None:
    called = rebalance_record(action="called", decisions=())
    shown = view(run_record(), step_record(30), called)
    assert [(row.outcome, row.num_moved, row.measured_after) for row in shown.rebalances] == [
        ("moved by a call", 2, None)
    ]
    assert shown.num_looks == 0


def test_the_placement_of_most_steps_counts() -> None:
    history = LayerHistory((Placed(0, AT_FIRST), Placed(14, MOVED), Placed(26, AT_FIRST)))
    first = np.array([0, 10, 20, 30, 0])
    assert history.during(first, first + 10).tolist() == [0, 1, 1, 2, 0]
    loads = np.array([step_record(step).layers[0].load for step in (10, 20, 30)])
    expected = [rank_spread(load, slots) for load, slots in zip(loads, (AT_FIRST, MOVED, MOVED), strict=True)]
    assert history.rank_spread(loads, first[:3], first[:3] + 10) == pytest.approx(expected)


def test_a_resume_places_experts_without_being_a_move() -> None:
    found = histories(all_events())
    assert found[LAYERS[0]].changes == (Placed(0, AT_FIRST), Placed(30, MOVED))
    assert found[LAYERS[1]].changes == (Placed(0, AT_FIRST),)


def resume(step: int, **placements: Any) -> ResumeRecord:
    return ResumeRecord(time=BEGAN + 100, step=step, path="c", placements=placements or dict.fromkeys(LAYERS, AT_FIRST))


def run_on_four(**changes: Any) -> RunRecord:
    layers = tuple(of.model_copy(update={"ep_size": 4, "expert_of_slot": ON_FOUR}) for of in run_record().layers)
    groups = (ExpertGroups(ep_size=4, ep_groups=((0, 1, 2, 3),), edp_groups=((0,), (1,), (2,), (3,))),)
    return run_record(time=BEGAN + 99, layers=layers, expert_groups=groups, **changes)


def test_each_record_has_the_placement_of_its_own_layout() -> None:
    on_four = resume(20, **dict.fromkeys(LAYERS, ON_FOUR))
    steps = [step_record(step) for step in (10, 20, 30)]
    shown = view(run_record(), *steps[:2], run_on_four(), on_four, steps[2])
    (layer, _) = shown.layers
    slots_of = dict(zip(layer.steps, (AT_FIRST, AT_FIRST, ON_FOUR), strict=True))
    for place, (step, slots) in enumerate(slots_of.items()):
        load = np.array(step_record(step).layers[0].load)
        assert layer.rank_spread[place] == pytest.approx(rank_spread(load, slots))
    assert (layer.first_slots, layer.first_step, layer.last_slots) == (ON_FOUR, 20, ON_FOUR)
    assert (layer.group, layer.num_groups) == ((0, 1, 2, 3), 1)
    assert "moved here" not in page(shown)


def test_late_figures_are_of_the_last_layout() -> None:
    """Sixteen records on two ranks, whose last three would be late, and one on four."""
    on_four = resume(160, **dict.fromkeys(LAYERS, ON_FOUR))
    before = [step_record(step) for step in range(10, 170, 10)]
    records = (run_record(), *before, run_on_four(), on_four)
    (layer, _) = view(*records, step_record(170)).layers
    load = np.array(step_record(170).layers[0].load)
    assert layer.late_loads().tolist() == load.tolist()
    assert layer.late_spread() == pytest.approx(rank_spread(load, ON_FOUR))
    later = [step_record(step) for step in range(170, 230, 10)]  # six: more than a quarter
    (layer, _) = view(*records, *later).layers
    loads = [np.array(record.layers[0].load) for record in later[-5:]]  # of 22
    assert layer.late_loads().tolist() == np.sum(loads, axis=0).tolist()
    assert layer.late_spread() == pytest.approx(np.mean([rank_spread(load, ON_FOUR) for load in loads]))


def test_moves_after_another_layout_are_counted_from_there() -> None:
    moved_on_four = ((0, 3), (2, 1), (4, 5), (6, 7))
    on_four = resume(20, **dict.fromkeys(LAYERS, ON_FOUR))
    called = rebalance_record(step=30, action="called", decisions=(), placements={LAYERS[0]: moved_on_four})
    steps = [step_record(step) for step in (10, 20, 30, 40)]
    shown = view(run_record(), *steps[:2], run_on_four(), on_four, steps[2], called, steps[3])
    (row,) = shown.rebalances
    assert (row.step, row.num_moved) == (30, 2)
    assert row.measured_before == pytest.approx(rank_spread(step_record(30).layers[0].load, ON_FOUR))
    assert row.measured_after == pytest.approx(rank_spread(step_record(40).layers[0].load, moved_on_four))
    assert "moved here since step 20" in page(shown)


def test_experts_moved_by_a_call_before_a_checkpoint_was_loaded() -> None:
    """The start counts from the resume's step: the call moved two of the experts that it had placed."""
    called = rebalance_record(
        step=0, action="called", decisions=(), placements={LAYERS[0]: ((0, 3), (2, 1), (4, 5), (6, 7))}
    )
    records = (run_record(), step_record(10), run_on_four(), called, resume(10), step_record(20))
    assert [row.num_moved for row in view(*records).rebalances] == [2]
    assert histories(records)[LAYERS[0]].changes == (Placed(0, AT_FIRST),)


def test_a_fine_tune_moves_from_its_checkpoint_on() -> None:
    loaded = resume(1000, **{LAYERS[0]: MOVED, LAYERS[1]: AT_FIRST})
    (layer, _) = view(run_record(), loaded, step_record(1010)).layers
    assert (layer.first_slots, layer.first_step, layer.last_slots) == (MOVED, 1000, MOVED)


def test_a_checkpoint_loaded_at_the_end_places_no_earlier_record() -> None:
    best = resume(10, **{LAYERS[0]: AT_FIRST})
    records = (run_record(), step_record(10), rebalance_record(step=10), step_record(20), best)
    assert histories(records)[LAYERS[0]].changes == (Placed(0, AT_FIRST), Placed(10, MOVED), Placed(20, AT_FIRST))


IN_FOUR_SLOTS = dict.fromkeys(LAYERS, ((0, 1), (2, 3)))
OTHER = run_record(
    time=BEGAN + 500,
    model="Other",
    layers=tuple(of.model_copy(update={"num_experts": 4, "expert_of_slot": ((0, 1), (2, 3))}) for of in RUN.layers),
)


@pytest.mark.parametrize(
    ("idle", "told"),
    [
        ([OTHER], "the run that began in this directory at 2026-09-21 14:21 UTC has no step yet; the one before it"),
        ([OTHER, resume(1000, **IN_FOUR_SLOTS)], "at 2026-09-21 14:21 UTC has no step yet; the one before it"),
        (
            [OTHER, OTHER],
            "the last 2 runs that began in this directory, from 2026-09-21 14:21 UTC on, have no step yet",
        ),
        ([run_on_four(), OTHER], "the last 2 runs that began in this directory, from 2026-09-21 14:14 UTC on, have no"),
        ([run_on_four(), resume(20, **dict.fromkeys(LAYERS, ON_FOUR)), run_on_four()], "the last 2 runs that began"),
        ([run_on_four(), rebalance_record(step=0, action="called", decisions=())], "has no step yet; the one before"),
    ],
)
def test_starts_that_made_no_step_change_nothing(idle: list[Record], told: str) -> None:
    """As after tries that ran out of memory: of another model, or on other ranks."""
    made = [RUN, step_record(10), step_record(20)]
    alone, shown = view(*made), view(*made, *idle)
    assert [each.text for each in shown.advice if told in each.text] != []
    assert len(shown.advice) == len(alone.advice) + 1
    assert "Not all that was written is shown" in [each.title for each in shown.advice]
    assert [each for each in shown.advice if told not in each.text] == list(alone.advice)
    assert (shown.facts, shown.nodes, shown.rebalances) == (alone.facts, alone.nodes, alone.rebalances)
    assert len(shown.layers) == 2
    for layer, before in zip(shown.layers, alone.layers, strict=True):
        assert (layer.first_slots, layer.last_slots, layer.group) == (AT_FIRST, AT_FIRST, (0, 1))
        assert layer.rank_spread == before.rank_spread


def test_starts_between_that_made_no_step_change_nothing() -> None:
    made = [RUN, step_record(10), run_record(time=BEGAN + 600), resume(10), step_record(20)]
    assert page(view(*made[:2], OTHER, resume(10, **IN_FOUR_SLOTS), *made[2:])) == page(view(*made))


def test_steps_of_which_there_is_no_record_made_their_moves() -> None:
    """The second start moved experts at step 13 and saved at 15, before its first record."""
    moved = rebalance_record(step=13)
    then = resume(15, **{LAYERS[0]: MOVED, LAYERS[1]: AT_FIRST})
    made = [RUN, step_record(10), run_record(time=1.0), resume(10), moved, run_record(time=2.0), then, step_record(20)]
    shown = view(*made)
    assert [(row.step, row.num_moved) for row in shown.rebalances] == [(13, 2)]
    assert dict(shown.facts)["Resumed"] == "at step 10, at step 15"


def test_no_start_made_a_step() -> None:
    shown = view(OTHER, run_record(time=BEGAN + 600))
    assert [each.title for each in shown.advice] == ["No step was recorded", "Watch it live"]
    assert dict(shown.facts)["Model"].startswith("Qwen3MoeForCausalLM")


def test_another_model_in_the_directory() -> None:
    """From its first step on, nothing of the run before is shown."""
    small = tuple(of.model_copy(update={"load": (100, 200, 300, 424)}) for of in step_record(1010).layers)
    loaded = resume(1000, **IN_FOUR_SLOTS)
    after = view(RUN, step_record(10), OTHER, loaded, step_record(1010, layers=small))
    assert [(layer.steps, layer.num_experts) for layer in after.layers] == [((1010,), 4)] * 2
    assert after.lines["loss"][0].steps == (1010,)
    assert any("is of other layers or experts, and left out" in each.text for each in after.advice)


def test_a_timeline_is_of_the_hosts_that_ran_it() -> None:
    elsewhere = run_record(time=BEGAN + 50, node_of_rank=("c",) * 4)
    events = RunEvents((run_record(), step_record(10), elsewhere, resume(10), step_record(20)))
    for step, node in ((10, "node-a"), (20, "c")):
        timeline = timeline_record(step)
        shown = view_of(settled(events), name="run", timeline=timeline, timeline_steps=(step,))
        assert shown.step is not None
        assert shown.step.ranks[0].node == node


def test_headline(whole: RunView) -> None:
    figures = {name: (value, beside) for name, value, beside in headline(whole)}
    assert figures["Tokens per second"] == ("2,050", "median, pauses left out")
    assert figures["Wire bytes"][0] == "1.12\N{MULTIPLICATION SIGN}"
    assert figures["Exposed communication"][0] == "16 %"
    assert figures["Experts moved"] == ("2", "at 1 step")


def test_attention_is_told_beside_the_layers() -> None:
    attention = AttentionStep(wire_bytes=1_500_000, exposed_seconds=0.25, exposed_fraction=0.05)
    shown = view(run_record(), *(step_record(step, attention=attention) for step in (10, 20)))
    assert [(line.name, line.values) for line in shown.lines["exposed"]] == [
        ("MoE layers", (0.16, 0.16)),
        ("attention", (0.05, 0.05)),
    ]
    assert "Attention over shared sequences sent 3.00 MB besides." in page(shown)
    assert ("Exposed communication", "16 %", "of time; attention's 5.0 %") in headline(shown)


def test_timeline_adds_up(whole: RunView) -> None:
    step = whole.step
    assert step is not None
    waits = {0: 2 * (500 + 800 + 500 + 900 + 500), 1: 2 * (500 + 800 + 3500 + 900 + 3500)}
    for rank in step.ranks:
        assert rank.exposed == pytest.approx(waits[rank.rank % 2] / 1e6)
        assert rank.exposed == pytest.approx(sum(wait.seconds for wait in rank.waits))
        assert rank.seconds("experts") == pytest.approx(6 * (0.009 if rank.rank % 2 == 0 else 0.006))
    assert step.names == ("router", "plan", "dispatch", "experts", "combine")
    assert step.exposed_fraction == pytest.approx(sum(2 * wait for wait in waits.values()) / 1e6 / 4 / 0.151)
    assert drawn_ranks(step) == step.ranks


def test_a_repeated_forward_counts_once() -> None:
    """Backward's combine holds the forward that checkpointing repeats, in which alone the rank waited."""
    spans = [
        ("router", "forward", 1, 2),
        ("combine", "forward", 6, 1),
        ("combine", "backward", 100, 50),
        ("router", "recompute", 110, 3),
        ("dispatch", "recompute", 113, 5),
        ("wait", "backward", 114, 2),
        ("experts", "recompute", 118, 7),
        ("combine", "recompute", 125, 4),
        ("dispatch", "recompute", 129, 1),
        ("wait", "backward", 129.5, 0.5),
        ("experts", "backward", 150, 20),
    ]
    timed = [Timed(name, phase, 0, start / 1e3, length / 1e3) for name, phase, start, length in spans]
    record = made_timeline([span_columns(timed)], LAYERS[:1], time=0, step=10)
    shown = view_of(
        settled(RunEvents((run_record(), step_record(10)))), name="run", timeline=record, timeline_steps=(10,)
    )
    assert shown.step is not None
    (rank,) = shown.step.ranks
    found = {name: 1e3 * rank.seconds(name) for name in shown.step.names}
    assert found == pytest.approx({"router": 5, "dispatch": 6, "experts": 27, "combine": 1 + 4 + 50 - 20})
    assert 1e3 * rank.exposed == pytest.approx(2.5)
    assert shown.step.exposed_fraction == pytest.approx(2.5 / 169)


def test_columns_of_the_heatmap_are_stretches_of_steps() -> None:
    (layer, _) = view(run_record(), *(step_record(step) for step in (10, 20, 50))).layers
    across, columns = heatmap_columns(layer)
    assert (across.low, across.high) == (0.0, 50.0)
    assert columns[[0, 1, 4]] == pytest.approx(layer.relative_loads)  # each record fills its own ten steps
    assert np.isnan(columns[[2, 3]]).all()


def test_a_record_fills_the_columns_that_it_covers() -> None:
    """Stretches of 10 steps up to 45: nine of 5 steps, as the median record is; the last record covers two of them."""
    lengths = {5: 5, 10: 5, 15: 5, 20: 5, 25: 5, 35: 10, 45: 10}
    records = [step_record(step, num_steps=length) for step, length in lengths.items()]
    (layer, _) = view(run_record(), *records).layers
    across, columns = heatmap_columns(layer)
    assert (across.low, across.high, len(columns)) == (0.0, 45.0, 9)
    assert columns == pytest.approx(layer.relative_loads[[0, 1, 2, 3, 4, 5, 5, 6, 6]])


def test_columns_of_a_long_run_add_its_records_up() -> None:
    records = [step_record(step) for step in range(10, 1930, 10)]
    (layer, _) = view(run_record(), *records).layers
    _, columns = heatmap_columns(layer)
    pairs = layer.loads.reshape(96, 2, 8).sum(axis=1)
    assert columns == pytest.approx(pairs / pairs.mean(axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (configured(), "rebalance.enabled = true"),
        (configured(rebalance={"enabled": True, "dry_run": True}), "rebalance.dry_run = false"),
        (configured(rebalance={"enabled": True}), "rebalance.interval"),
    ],
)
def test_uneven_load_is_told_with_what_to_do(config: dict[str, Any], word: str) -> None:
    even = step_record(10).layers[1]
    skewed = even.model_copy(update={"load": (300, 300, 300, 300, 100, 100, 100, 100)})
    found = view(run_record(ds_config=config), step_record(10, layers=(skewed,), exposed_fraction=0.0)).advice
    assert [each.title for each in found] == [
        f"{LAYERS[1]}: the busiest rank gets 1.50\N{MULTIPLICATION SIGN} the mean"
    ]
    assert word in found[0].text


def test_one_expert_alone_cannot_be_evened_out() -> None:
    hot = step_record(10).layers[0].model_copy(update={"load": (1000, 100, 100, 100, 100, 100, 100, 100)})
    (each, *_) = view(run_record(ds_config=configured()), step_record(10, layers=(hot,))).advice
    assert "Expert 0 has 4.71\N{MULTIPLICATION SIGN} the mean expert's tokens" in each.text  # 1000 / (1700 / 8)
    assert "below 1.53\N{MULTIPLICATION SIGN}" in each.text  # it and the three lightest: 1300 / (1700 / 2)


def test_a_hot_expert_among_others_can_be_relieved() -> None:
    """The busiest rank has 1550 of 1700 / 2; with the three lightest beside the hot expert it has 1150."""
    loads = (1000, 250, 250, 50, 50, 50, 50, 0)
    hot = step_record(10).layers[0].model_copy(update={"load": loads})
    (each, *_) = view(run_record(ds_config=configured()), step_record(10, layers=(hot,))).advice
    assert "the busiest rank gets 1.82\N{MULTIPLICATION SIGN} the mean" in each.title
    assert "rebalance.enabled = true" in each.text
    assert "A placement could reach 1.29\N{MULTIPLICATION SIGN} at best" in each.text


def test_what_else_is_told() -> None:
    quiet = run_record(ds_config=configured(), node_of_rank=("a",) * 4)
    calm = {"exposed_fraction": 0.01, "layers": step_record(40).layers[1:]}
    assert titles(quiet, step_record(10, **calm)) == []
    assert titles(quiet, step_record(10, **(calm | {"exposed_fraction": 0.3}))) == ["Exposed communication takes 30 %"]
    assert titles(quiet, step_record(10, loss=math.nan, **calm)) == ["The loss is not a number from step 10 on"]
    assert titles(quiet) == ["No step was recorded"]
    silent = calm["layers"][0].model_copy(update={"load": (0, 100, 100, 100, 100, 100, 100, 100)})
    assert titles(quiet, step_record(10, **(calm | {"layers": (silent,)}))) == [
        f"{LAYERS[1]}: 1 expert got no token lately"
    ]
    off = rebalance_record(action="off", decisions=(), placements={}, reason="no optimizer state")
    assert titles(quiet, step_record(30, **calm), off) == ["Rebalancing switched itself off at step 30"]
    lost = GainRecord(time=0, step=60, layer=LAYERS[1], moved_at=30, predicted=0.004, measured=-0.002)
    assert titles(quiet, step_record(60, **calm), lost) == [f"{LAYERS[1]}: moves that did not pay"]
    slow = [step_record(step, tokens_per_second=1000.0 if step > 60 else 2000.0, **calm) for step in range(10, 130, 10)]
    assert titles(quiet, *slow) == ["The run became 50 % slower"]
    flips = [
        DispatcherRecord(
            time=0, step=step, layer=LAYERS[1], before="x", after="y", predicted_seconds={}, reason="quicker"
        )
        for step in (1, 21, 41, 61)
    ]
    assert titles(quiet, *flips, step_record(60, **calm)) == [f"{LAYERS[1]} changed its dispatcher 4 times"]
    fat = [
        step_record(step, host_memory=(step * 10**8,), **calm) for step in range(10, 90, 10)
    ]  # from 3 GB after a quarter to 8 GB
    assert titles(quiet, *fat) == ["Host memory keeps growing"]
    assert titles(run_record(ds_config={}, node_of_rank=("a",) * 4), step_record(10, **calm)) == ["Watch it live"]


@pytest.mark.parametrize(
    ("mode", "named", "is_told"),
    [
        ("alltoall", "alltoall", True),
        ("allgather", "allgather", True),
        ("two_stage", "two_stage", True),
        ("two_stage", "auto", True),
        ("alltoall", "auto", False),
        ("hierarchical", "hierarchical", False),
        ("replicated", "replicated", False),
    ],
)
def test_bytes_that_another_mode_would_save_are_told(mode: str, named: str, is_told: bool) -> None:
    layer = step_record(40).layers[1].model_copy(update={"wire_bytes": {mode: 2_040_000}, "mode": mode})
    run = run_record(ds_config=configured(dispatch={"mode": named}))
    found = titles(run, step_record(10, exposed_fraction=0.0, layers=(layer,)))
    assert found == [f"{LAYERS[1]} sends 2.40\N{MULTIPLICATION SIGN} the lower bound"] * is_told


@pytest.mark.parametrize(
    ("group", "named", "is_told"),
    [
        ((0, 1), "two_stage", False),
        ((0, 2), "two_stage", True),
        ((0, 2), "auto", False),
        ((0, 2), "hierarchical", False),
    ],
)
def test_hierarchical_is_for_groups_over_nodes(group: tuple[int, int], named: str, is_told: bool) -> None:
    groups = ExpertGroups(ep_size=2, ep_groups=(group,), edp_groups=())
    run = run_record(ds_config=configured(dispatch={"mode": named}), expert_groups=(groups,))
    layers = step_record(40).layers[1:]
    (waiting,) = view(run, step_record(10, exposed_fraction=0.3, layers=layers)).advice
    assert ("dispatch.mode = hierarchical" in waiting.text) == is_told


@pytest.mark.parametrize(
    ("section", "device", "told"),
    [
        ({"kv_gather": "ring"}, "cpu", ("kv_gather = auto", "memory_bytes", "sequence_parallel_size")),
        ({"kv_gather": "auto"}, "gpu", ("fp8_e4m3", "memory_bytes", "sequence_parallel_size")),
        (
            {"kv_gather": "auto", "wire_dtype": "fp8_e4m3", "memory_bytes": 1 << 30},
            "gpu",
            ("sequence_parallel_size",),
        ),
    ],
)
def test_waiting_in_attention_is_told(section: dict[str, Any], device: str, told: tuple[str, ...]) -> None:
    """By the last quarter of the records, beside layers that hardly wait."""
    run = run_record(ds_config=configured(attention=section), device=device)
    layers = step_record(40).layers[1:]

    def ending_with(fraction: float) -> tuple[Advice, ...]:
        fractions = [0.4, 0.0, 0.0, fraction]
        attention = [AttentionStep(wire_bytes=1, exposed_seconds=1.0, exposed_fraction=each) for each in fractions]
        steps = [
            step_record(10 * place, attention=each, exposed_fraction=0.01, layers=layers)
            for place, each in enumerate(attention, start=1)
        ]
        return view(run, *steps).advice

    (each,) = ending_with(0.6)
    assert each.title == "Exposed communication of attention takes 60 %"
    words = ("kv_gather = auto", "fp8_e4m3", "memory_bytes", "sequence_parallel_size")
    assert tuple(word for word in words if word in each.text) == told
    assert ending_with(0.1) == ()


def test_dry_runs_and_refusals_are_rows() -> None:
    rows = view(
        run_record(),
        step_record(30),
        rebalance_record(action="dry_run", placements={}),
        rebalance_record(
            step=60, action="stays", decisions=(decision(LAYERS[1], 1.2, 1.1, 2, pays=False),), placements={}
        ),
    ).rebalances
    assert [(row.step, row.layer, row.outcome) for row in rows] == [
        (30, LAYERS[0], "dry run"),
        (60, LAYERS[1], "does not pay"),
    ]


class _Tags(HTMLParser):
    """Checks that elements close in the order in which they opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("records", [all_events(), [run_record()], [run_record(world_size=1, layers=())]])
def test_page_is_well_formed_and_fetches_nothing(records: list[Record]) -> None:
    html = page(view(*records))
    tags = _Tags()
    tags.feed(html)
    tags.close()
    assert tags.open == []
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in html
    assert "url(" not in html.replace("url(#waiting)", "")


def test_pictures_hold_what_the_page_holds(whole: RunView, tmp_path: Path) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    from ds_hybrid.observe.report.figures import figures_of

    figures = {each.name: each for each in figures_of(whole)}
    assert list(figures) == ["training", "expert_load", "timeline", "bytes", "rebalances", "placement"]
    canvas = figure_module.Figure(figsize=(12, 4))
    figures["expert_load"].draw(canvas)
    (image,) = canvas.axes[0].images
    assert np.asarray(image.get_array()) == pytest.approx(whole.layers[0].relative_loads.T)
    canvas = figure_module.Figure(figsize=(9, 3))
    figures["bytes"].draw(canvas)
    assert [bar.get_width() for bar in canvas.axes[0].patches] == pytest.approx([900_000 / 2560, 1_000_000 / 2560])
