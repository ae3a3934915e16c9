"""launch/bench/layouts.py: what it compares and how it tells; its run on real ranks is docs/planner.md's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).parents[2] / "launch" / "bench"))
layouts = pytest.importorskip("layouts")


@pytest.mark.parametrize("world_size", [4, 8])
def test_at_least_six_different_layouts(world_size: int) -> None:
    candidates = layouts.candidates(world_size)
    assert len({layouts.name_of(candidate) for candidate in candidates}) == len(candidates) >= 6
    assert all(candidate.world_size == world_size for candidate in candidates)


def test_rank_correlation_by_hand() -> None:
    """1 - 6 sum d^2 / (n (n^2 - 1)), d the differences of places."""
    assert layouts.rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert layouts.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert layouts.rank_correlation([1, 2, 3, 4], [2, 1, 3, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))


def test_equal_predictions_share_their_places() -> None:
    """No order between them counts as right; against scipy's."""
    first, second = [3.0, 3.0, 1.0, 3.0, 7.0], [2.0, 9.0, 4.0, 4.0, 5.0]
    assert layouts.rank_correlation(first, second) == pytest.approx(spearmanr(first, second).statistic)
    assert layouts.rank_correlation([1, 1, 2], [5, 6, 7]) == layouts.rank_correlation([1, 1, 2], [6, 5, 7])


def test_the_table_is_in_the_predicted_order() -> None:
    rows = [layouts.Row("slow", 2.0, 4.0, 1.0), layouts.Row("quick", 1.0, 1.0, 2.0)]
    agreed = layouts.agreement(rows)
    assert agreed.ratios == (0.5, 1.0)
    text = layouts.to_markdown(rows, agreed)
    assert text.index("quick") < text.index("slow")
    assert "measured seconds 1.00, with CPU seconds -1.00" in text
