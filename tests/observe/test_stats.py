"""Derived figures of MoEStats, on numbers that can be checked by hand."""

from __future__ import annotations

import math

import pytest

from ds_hybrid.observe.stats import LayerStats, MoEStats


def layer(load: tuple[int, ...], payload: int = 0, metadata: int = 0, bound: int = 0, tokens: int = 10) -> LayerStats:
    return LayerStats("layer", "two_stage", payload, metadata, bound, tokens, load)


def test_figures_of_two_layers() -> None:
    stats = MoEStats((layer((1, 3), payload=90, metadata=10, bound=80), layer((5, 5), payload=50, bound=40)))
    assert stats.wire_bytes_per_token == pytest.approx(10 + 5)
    assert stats.lower_bound_ratio == pytest.approx(150 / 120)
    assert stats.load_max_over_mean == pytest.approx(1.5)


def test_nothing_routed_and_nothing_sent() -> None:
    stats = MoEStats((layer((0, 0), tokens=0),))
    assert stats.wire_bytes_per_token == 0.0
    assert math.isnan(stats.lower_bound_ratio)
    assert math.isnan(stats.load_max_over_mean)
    assert math.isnan(MoEStats(()).load_max_over_mean)
