"""The article's techniques as runs: each row is the run that it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hybrid.errors import ConfigError
from ds_hybrid.plan.candidate import Workload
from ds_hybrid.plan.machine import read_machine
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.popularity import read_popularity
from ds_hybrid.plan.simulate import Setting, simulate
from ds_hybrid.plan.techniques import techniques
from ds_hybrid.plan.windows import RebalancePolicy

MACHINE = read_machine("a100x8_ib200")
QWEN = read_model("qwen3_30b_a3b")
SETTING = Setting(QWEN, Workload(32768), MACHINE, MACHINE.cluster(16))
POLICY = RebalancePolicy("static", interval=5, first=5)
RUN = read_popularity("zipf:1.0", QWEN, num_steps=12)


def test_rows_are_runs() -> None:
    rows = techniques(SETTING, RUN, POLICY)
    plan_b = rows[4]
    assert plan_b.technique == "3. plan B: EP 8"
    assert plan_b.together is not None
    where = replace(SETTING, tp_size=2, micro_batches=2, checkpoints=True, wire_dtype="fp8_e4m3")
    (outcome,) = simulate(where, RUN, modes=["two_stage"], ep_sizes=[8], policies=[POLICY])
    assert plan_b.together.tokens_per_second == outcome.tokens_per_second
    assert plan_b.together.step == outcome.step_seconds.mean()
    base = replace(SETTING, tp_size=4, micro_batches=4, checkpoints=True)
    (outcome,) = simulate(base, RUN, modes=["alltoall"], ep_sizes=[8], policies=[POLICY])
    assert plan_b.alone.tokens_per_second == outcome.tokens_per_second


def test_rows_beside_the_sum_are_runs_too() -> None:
    """Plan A by replicated tokens, and both ways to move experts: each alone on the base."""
    plan_a, round_robin, swap = techniques(SETTING, RUN, POLICY)[5:8]
    assert (plan_a.together, round_robin.together) == (None, None)
    base = replace(SETTING, tp_size=4, micro_batches=4, checkpoints=True)
    for row, mode, algorithm in (
        (plan_a, "replicated", "static"),
        (round_robin, "alltoall", "article_round_robin"),
        (swap, "alltoall", "swap"),
    ):
        policy = replace(POLICY, algorithm=algorithm)
        (outcome,) = simulate(base, RUN, modes=[mode], ep_sizes=[4], policies=[policy])  # type: ignore[list-item]
        assert row.alone.tokens_per_second == outcome.tokens_per_second, row.technique
        assert row.alone.num_moves == outcome.num_moves
        assert (outcome.num_moves > 0) == (algorithm != "static")
        assert row.alone.peak_memory == outcome.peak_memory


def test_what_must_hold_of_any_of_them() -> None:
    rows = {row.technique[:2]: row for row in techniques(SETTING, RUN, POLICY)}
    base, two_stage, fp8 = rows["ba"].alone, rows["2a"].alone, rows["2b"].alone
    assert two_stage.dispatch < base.dispatch
    assert fp8.dispatch < base.dispatch
    assert two_stage.experts == fp8.experts == base.experts
    assert rows["4."].alone.imbalance < base.imbalance  # swap, the later of the two
    assert rows["5b"].alone.step < rows["5a"].alone.step


def test_every_row_takes_the_same_tokens_in_a_step() -> None:
    for row in techniques(SETTING, RUN, POLICY):
        assert row.alone.tokens_per_second * row.alone.step == pytest.approx(16 * 32768), row.technique


def test_ranks_that_the_layouts_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="--article: its layouts share 12 ranks out over 8 ranks"):
        techniques(replace(SETTING, cluster=MACHINE.cluster(12)), RUN, POLICY)
