"""What is tried, what is dropped and why, and the order of the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hybrid.config import check
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.ds_config import to_ds_config
from ds_hybrid.plan.machine import read_machine
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.routing import read_routing
from ds_hybrid.plan.search import TOO_LARGE, Findings, Request, best_of_sizes, search
from ds_hybrid.topology.hostfile import parse_hostfile

QWEN = read_model("qwen3_30b_a3b")
H200 = read_machine("h200x8_ib400")


def request(seq_len: int = 4096, *, num_ranks: int = 16, routing: str = "zipf:1.0") -> Request:
    return Request(QWEN, Workload(seq_len), H200, H200.cluster(num_ranks), read_routing(routing, QWEN))


@pytest.fixture(scope="module")
def found() -> Findings:
    return search(request())


def test_every_combination_is_accounted_for(found: Findings) -> None:
    assert found.num_combinations == (5 + 4) * 5 * 4 * 5 * 2 * 2  # TP or SP, EP, stages, dispatchers, checkpoints, loss
    assert len(found.fitting) + sum(found.dropped.values()) == found.num_combinations
    reasons = "\n".join(found.dropped)
    for part in ("TP size that does not divide 4", "refused by ds_hybrid validate", TOO_LARGE, "slower than the same"):
        assert part in reasons


def test_what_is_left_fits_and_is_ordered_by_speed(found: Findings) -> None:
    speeds = [float(f"{estimate.tokens_per_second:.4g}") for estimate in found.fitting]
    assert speeds == sorted(speeds, reverse=True)
    assert all(estimate.memory.peak <= H200.memory_bytes for estimate in found.fitting)
    assert len({estimate.candidate.sizes for estimate in found.fitting}) == len(found.fitting)


def test_plans_a_and_b_and_what_lies_between_are_tried(found: Findings) -> None:
    sizes = {(estimate.candidate.tp_size, estimate.candidate.ep_size) for estimate in found.fitting}
    assert {(4, 4), (2, 8), (1, 8), (2, 2), (4, 2), (4, 8)} <= sizes


def test_no_combination_of_the_same_sizes_is_quicker(found: Findings) -> None:
    best = next(
        e for e in found.fitting if (e.candidate.tp_size, e.candidate.sp_size, e.candidate.ep_size) == (1, 1, 8)
    )
    same = [best_of_sizes(request(), 1, 8, mode) for mode in ("alltoall", "allgather", "two_stage")]
    assert max(e.tokens_per_second for e in same if not isinstance(e, str)) == best.tokens_per_second


def test_every_plan_is_a_ds_config_that_validate_accepts(found: Findings) -> None:
    for estimate in found.fitting:
        document = to_ds_config(QWEN, Workload(4096), estimate.candidate)
        config = check(document, name="plan", world_size=16, num_experts=128, allow_auto=False)
        assert config.dispatch.mode == estimate.candidate.mode


def test_nothing_fits_gives_the_nearest() -> None:
    small = replace(H200, memory_bytes=20e9)
    found = search(replace(request(), machine=small))
    assert found.fitting == ()
    peaks = [estimate.memory.peak for estimate in found.nearest]
    assert peaks == sorted(peaks)
    assert peaks[0] > 20e9


def test_less_memory_asks_for_more_savings() -> None:
    """What fits whole is taken whole; with less memory layers are computed again, and the loss is cut."""
    roomy, tight = (
        best_of_sizes(replace(request(), machine=replace(H200, memory_bytes=memory)), 1, 8, "two_stage")
        for memory in (1e12, 50e9)
    )
    assert not isinstance(roomy, str)
    assert not isinstance(tight, str)
    assert not roomy.candidate.checkpoints
    assert not roomy.candidate.chunked_loss
    assert tight.candidate.checkpoints
    assert tight.tokens_per_second < roomy.tokens_per_second


def test_one_stage_alone() -> None:
    found = search(replace(request(), zero_stages=(2,)))
    assert {estimate.candidate.zero_stage for estimate in found.fitting} == {2}


def test_groups_over_unequal_hosts_have_no_two_hops() -> None:
    """Hosts of 6 and 2: groups of 8 span both, with unequal shares, and the mode over hosts is never taken."""
    cluster = H200.cluster_of(parse_hostfile("one slots=6\ntwo slots=2\n", name="hosts"))
    found = search(replace(request(), cluster=cluster))
    over_both = [estimate for estimate in found.fitting if estimate.candidate.ep_size == 8]
    assert over_both
    assert {estimate.num_hosts_of_group for estimate in over_both} == {2}
    assert all(estimate.candidate.mode != "hierarchical" for estimate in found.fitting)
    assert any("do not span several with equal shares" in reason for reason in found.dropped)


def test_tensor_parallel_groups_bring_their_partition() -> None:
    document = to_ds_config(QWEN, Workload(4096), Candidate(16, 4, 4, 1, "replicated"))
    assert document["tensor_parallel"]["autotp_size"] == 4
    assert "tensor_parallel" not in to_ds_config(QWEN, Workload(4096), Candidate(16, 1, 4, 1, "two_stage"))
