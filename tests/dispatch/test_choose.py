"""Which mode is chosen: by bytes before anything is measured, by time afterwards, and not for a little."""

from __future__ import annotations

from typing import get_args

import pytest

from ds_hybrid.config import DispatchConfig
from ds_hybrid.dispatch.choose import candidates, choose_mode, decide
from ds_hybrid.dispatch.modes import MODES, Mode
from ds_hybrid.dispatch.traffic import WireShape, expected_bytes


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "top_k", "expected"),
    [
        (1, 8, 2, "alltoall"),  # nothing leaves the rank: the simplest
        (4, 64, 1, "alltoall"),  # one choice: nothing to share, and no ids to gather
        (4, 64, 8, "two_stage"),
        (16, 64, 4, "two_stage"),
        (2, 4, 4, "allgather"),  # every rank needs every token: the simplest that sends it once
    ],
)
def test_choice_by_bytes(num_ranks: int, num_experts: int, top_k: int, expected: Mode) -> None:
    shape = WireShape(num_ranks=num_ranks, num_experts=num_experts, top_k=top_k, hidden_size=1024, value_bytes=2)
    assert choose_mode(shape) == expected


@pytest.mark.parametrize(
    ("current", "seconds", "expected"),
    [
        ("alltoall", {"alltoall": 1.0, "allgather": 2.0, "two_stage": 0.89}, "two_stage"),
        ("alltoall", {"alltoall": 1.0, "allgather": 2.0, "two_stage": 0.91}, "alltoall"),  # less than a tenth
        ("alltoall", {"alltoall": 1.0, "allgather": 2.0, "two_stage": 1.0}, "alltoall"),
        ("allgather", {"alltoall": 0.5, "allgather": 1.0, "two_stage": 0.4}, "two_stage"),  # the best, not the first
        ("hierarchical", {"alltoall": 3.0, "two_stage": 2.0, "hierarchical": 1.0}, "hierarchical"),
    ],
)
def test_decision_by_time(current: Mode, seconds: dict[Mode, float], expected: Mode) -> None:
    assert decide(current, seconds) == expected


@pytest.mark.parametrize(
    ("mode", "num_ranks", "spans_nodes", "expected"),
    [
        ("two_stage", 4, True, ("two_stage",)),
        ("auto", 1, False, ("allgather",)),
        ("hierarchical", 1, False, ("allgather",)),
        ("hierarchical", 4, True, ("hierarchical",)),
        ("auto", 4, False, ("alltoall", "allgather", "two_stage")),
        ("auto", 4, True, ("alltoall", "allgather", "two_stage", "hierarchical")),
    ],
)
def test_candidates(mode: Mode, num_ranks: int, spans_nodes: bool, expected: tuple[Mode, ...]) -> None:
    assert candidates(mode, num_ranks=num_ranks, spans_nodes=spans_nodes) == expected


def test_the_config_takes_every_mode() -> None:
    modes = get_args(DispatchConfig.model_fields["mode"].annotation)
    assert set(modes) == {"auto", *MODES, "hierarchical", "replicated"}


def test_two_stage_metadata_is_small_where_rows_are_wide() -> None:
    """bf16, hidden size 256, K = 8, P = 4: within 1.05 of the rows that have to cross."""
    shape = WireShape(num_ranks=4, num_experts=64, top_k=8, hidden_size=256, value_bytes=2)
    rows_alone = 2 * 2.7366 * shape.row_bytes
    assert expected_bytes("two_stage", shape) / rows_alone == pytest.approx(1.0418, abs=1e-3)
