"""What ranks get of skewed routing, against the formula of the dispatchers and against sampled tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds_hybrid.dispatch.traffic import expected_rows
from ds_hybrid.errors import ConfigError
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.routing import NUM_DRAWS, chance_of_need, read_routing

QWEN = read_model("qwen3_30b_a3b")
MIXTRAL = read_model("mixtral_8x7b")


@pytest.mark.parametrize(("model", "num_ranks"), [(QWEN, 16), (QWEN, 2), (MIXTRAL, 4), (MIXTRAL, 8)])
def test_uniform_routing_needs_the_rows_of_the_formula(model: object, num_ranks: int) -> None:
    demand = read_routing("uniform", model).demand(num_ranks)
    rows = expected_rows("two_stage", num_ranks=num_ranks, num_experts=model.num_experts, top_k=model.top_k)
    assert demand.rows[1:].sum() == pytest.approx(rows)
    assert demand.pairs == pytest.approx(model.top_k / num_ranks)
    assert demand.load == demand.load_p99 == demand.load_of_model_p99 == pytest.approx(1)


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_chances_under_skew_are_those_of_sampled_tokens(top_k: int) -> None:
    rng = np.random.default_rng(1)
    scores = -1.2 * np.log(np.arange(1, 65)) + rng.gumbel(size=(100_000, 64))
    picks = np.argsort(-scores, axis=1)[:, :top_k]
    inclusion = np.bincount(picks.ravel(), minlength=64) / len(picks)
    order = rng.permutation(64)
    chances = chance_of_need(inclusion[order].reshape(1, 8, 8), top_k)[0]
    rank_of_expert = np.empty(64, dtype=int)
    rank_of_expert[order] = np.arange(64) // 8
    for rank in range(8):
        assert chances[rank] == pytest.approx((rank_of_expert[picks] == rank).any(1).mean(), abs=0.03)


def test_a_group_of_one_needs_every_token() -> None:
    assert read_routing("zipf:1.0", QWEN).demand(1).rows == pytest.approx([1.0])


def test_zipf_is_the_prior_with_gumbel_noise() -> None:
    """K = 1: the shares are the prior itself."""
    law = read_routing("zipf:1.0", replace(QWEN, top_k=1, num_experts=16))
    shares = np.sort(law.inclusion[0])[::-1]
    expected = 1 / np.arange(1, 17)
    assert shares == pytest.approx(expected / expected.sum(), abs=0.01)
    assert law.inclusion.shape == (NUM_DRAWS, 16)


def test_more_skew_and_more_ranks_mean_more_load_on_the_busiest() -> None:
    loads = [read_routing(f"zipf:{s}", QWEN).demand(16).load for s in (0, 0.5, 1.0)]
    assert loads == sorted(loads)
    law = read_routing("zipf:1.0", QWEN)
    by_ranks = [law.demand(num_ranks) for num_ranks in (2, 8, 32)]
    assert [d.load for d in by_ranks] == sorted(d.load for d in by_ranks)
    for demand in by_ranks:
        assert demand.load < demand.load_p99
        assert 1 < demand.load_of_model_p99 < demand.load  # layers even each other out
        assert demand.pairs.sum() == pytest.approx(8)


def test_a_trace_gives_its_own_shares(tmp_path: Path) -> None:
    counts = np.zeros((4, 2, 8), dtype=np.int64)
    counts[...] = [40, 40, 10, 10, 25, 25, 25, 25]
    np.savez(tmp_path / "trace.npz", counts=counts)
    demand = read_routing(str(tmp_path / "trace.npz"), MIXTRAL).demand(4)
    assert demand.pairs == pytest.approx([0.8, 0.2, 0.5, 0.5])
    assert demand.load == pytest.approx(1.6)
    with pytest.raises(ConfigError, match="a trace of 8 experts, but qwen3_30b_a3b has 128"):
        read_routing(str(tmp_path / "trace.npz"), QWEN)


def test_a_trace_of_another_number_of_choices_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "trace.npz", counts=np.ones((4, 2, 8), dtype=np.int64), meta=np.array("{'top_k': [4, 4]}"))
    with pytest.raises(ConfigError, match="a trace of 4 choices of a token, but mixtral_8x7b has 2"):
        read_routing(str(tmp_path / "trace.npz"), MIXTRAL)


@pytest.mark.parametrize("text", ["zipf", "zipf:x", "zipf:-1", "zipf:nan", "even"])
def test_wrong_laws(text: str) -> None:
    with pytest.raises(ConfigError, match="--routing"):
        read_routing(text, QWEN)
