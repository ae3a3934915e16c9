"""The decayed mean of token counts, against its definition."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ds_hybrid.rebalance.load import ExpertLoad


def counts_of(num_steps: int, num_experts: int = 5) -> np.ndarray:
    return np.random.default_rng(num_steps).integers(0, 1000, (num_steps, num_experts))


def load_after(counts: np.ndarray, half_life: float) -> ExpertLoad:
    load = ExpertLoad.unknown(counts.shape[1], half_life=half_life)
    for step in counts:
        load = load.after(step)
    return load


@pytest.mark.parametrize("half_life", [0.5, 3, 50])
@pytest.mark.parametrize("num_steps", [1, 2, 7, 300])
def test_forecast_is_the_weighted_mean(half_life: float, num_steps: int) -> None:
    counts = counts_of(num_steps)
    weights = 0.5 ** (np.arange(num_steps)[::-1] / half_life)
    expected = (weights[:, None] * counts).sum(0) / weights.sum()
    np.testing.assert_allclose(load_after(counts, half_life).forecast, expected, rtol=1e-13)


def test_half_life_is_in_steps() -> None:
    """An expert that got 100 pairs eight steps ago, and nothing since, has half of what one has that got them now."""
    counts = np.zeros((9, 2), dtype=np.int64)
    counts[0, 0] = counts[8, 1] = 100
    early, late = load_after(counts, half_life=8).forecast
    assert early / late == pytest.approx(0.5, rel=1e-12)


def test_adams_bias_correction_gives_the_same() -> None:
    counts, beta = counts_of(40), 0.5 ** (1 / 10)
    average = np.zeros(5)
    for step in counts:
        average = beta * average + (1 - beta) * step
    np.testing.assert_allclose(load_after(counts, half_life=10).forecast, average / (1 - beta**40), rtol=1e-12)


def test_before_the_first_step_nothing_is_expected() -> None:
    assert ExpertLoad.unknown(3, half_life=50).forecast.tolist() == [0, 0, 0]


def test_json_keeps_every_bit() -> None:
    load = load_after(counts_of(123), half_life=7.3)
    back = ExpertLoad.from_json(json.loads(json.dumps(load.to_json())))
    more = counts_of(1)[0]
    assert back.after(more).decayed_counts.tobytes() == load.after(more).decayed_counts.tobytes()
    assert back.after(more).forecast.tobytes() == load.after(more).forecast.tobytes()
    assert back.half_life == 7.3


def test_what_is_counted_cannot_be_changed() -> None:
    counts = np.array([1, 2])
    load = ExpertLoad.unknown(2, half_life=1).after(counts)
    counts[0] = 9
    assert load.forecast.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        load.decayed_counts[0] = 5
