"""Popularity over a run: drawn with drift, recorded, refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds_hybrid.errors import ConfigError
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.popularity import of_run, read_popularity
from ds_hybrid.plan.routing import read_routing
from tests.rebalance.traces import FOLDER, trace

QWEN = read_model("qwen3_30b_a3b")


def test_zipf_is_the_planners() -> None:
    run = read_popularity("zipf:1.2", QWEN, num_steps=2)
    law = np.sort(read_routing("zipf:1.2", QWEN).inclusion[0])
    for layer in range(48):
        assert np.sort(run.inclusion(0, 2, layer)) == pytest.approx(np.tile(law, (2, 1)), rel=1e-5)


def test_a_trace_is_its_counts() -> None:
    run = read_popularity(str(FOLDER / "e32k2_aux1e-2.npz"), QWEN, num_steps=7, top_k=2)
    counts = trace("e32k2_aux1e-2").counts
    assert run.weights.shape == (7, 4, 32)
    assert run.inclusion(3, 5, 1) == pytest.approx(2 * counts[3:5, 1] / 4096)
    model = of_run(QWEN, run)
    assert (model.num_experts, model.top_k, model.num_moe_layers) == (32, 2, 48)
    assert len(read_popularity(str(FOLDER / "e32k2_aux1e-2.npz"), QWEN, num_steps=None, top_k=2).weights) == 1148


def test_a_trace_tells_how_many_experts_a_token_takes(tmp_path: Path) -> None:
    path = str(FOLDER / "e32k2_aux1e-2.npz")
    run = read_popularity(path, QWEN, num_steps=3)
    assert run.top_k == 2
    assert run.inclusion(0, 3, 0).sum(1) == pytest.approx([2] * 3)
    counts = np.ones((3, 2, 128), dtype=np.int64)
    for meta, top_k in (({}, 8), ({"top_k": [4, 4]}, 4), ({"top_k": [4, 2]}, 8), ({"k": "many"}, 8)):
        np.savez(tmp_path / "trace.npz", counts=counts, meta=np.array(repr(meta)))
        assert read_popularity(str(tmp_path / "trace.npz"), QWEN, num_steps=None).top_k == top_k


def test_drift_renews_what_it_says() -> None:
    """Scores after n steps correlate by (1 - D) ** (n / 2); places by 6 / pi * asin of half of it (Pearson, 1907)."""
    run = read_popularity("zipf:1.0,drift=0.02", QWEN, num_steps=101)
    places = run.weights.argsort(2).argsort(2).reshape(101, -1).astype(float)
    for lag in (1, 20, 100):
        of_ranks = 6 / np.pi * np.arcsin(0.98 ** (lag / 2) / 2)
        assert np.corrcoef(places[0], places[lag])[0, 1] == pytest.approx(of_ranks, abs=0.04)
    assert (np.sort(run.weights, axis=2) == np.sort(run.weights[0, 0])).all()
    still = read_popularity("zipf:1.0", QWEN, num_steps=3).weights
    assert (still == still[0]).all()
    assert not (still[0, 0] == still[0, 1]).all()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("zipf:1.0,drift=2", {}, r"after the comma must be drift=D, a number from 0 to 1"),
        ("zipf:1.0,drifts=0.1", {}, r"after the comma must be drift=D"),
        ("uniform", {}, r"must be a trace's .npz file, or zipf:S\[,drift=D\]"),
        ("zipf:1.0", {"top_k": 3}, r"--top-k is for traces alone"),
        ("zipf:high", {}, '^"zipf:high": the exponent must be a number'),
        ("zipf:1.0,", {}, r"after the comma must be drift=D"),
        ("e32k2_noaux.npz", {"top_k": 4}, r"--top-k 4: .* was recorded with 2. Leave it out"),
        ("synth_switch.npz", {}, r"does not tell how many of its 64 experts a token takes, and qwen3_30b_a3b has 128"),
        ("synth_switch.npz", {"top_k": 40}, r"more than one choice of 40 of every token. Give the --top-k of the run"),
        ("synth_stationary.npz", {"num_steps": 1300}, "--steps 1300: .* has 1200. Leave it out, or give fewer."),
    ],
)
def test_routing_that_is_refused(text: str, options: dict[str, int], message: str) -> None:
    path = str(FOLDER / text) if Path(text).suffix == ".npz" else text
    with pytest.raises(ConfigError, match=message):
        read_popularity(path, QWEN, **{"num_steps": None, **options})
