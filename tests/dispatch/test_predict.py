"""Predicted messages add up to the exact formulas; predicted times rank the modes as the links and the skew say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ds_hybrid.dispatch.demand import DemandTotal, demand_of
from ds_hybrid.dispatch.modes import MODES, Mode
from ds_hybrid.dispatch.predict import DemandTable, GroupSpeed, Way, messages, predicted_seconds
from ds_hybrid.dispatch.traffic import WireShape, backward_traffic, forward_traffic

NODE_OF_RANK = (0, 1, 1, 0)
SHAPE = WireShape(num_ranks=4, num_experts=16, top_k=3, hidden_size=64, value_bytes=2, wire_dtype="fp8_e4m3")


def routed(num_tokens: Sequence[int], shape: WireShape = SHAPE, *, seed: int = 0) -> list[npt.NDArray[np.int64]]:
    """The rank of each choice, for each rank's tokens."""
    rng = np.random.default_rng(seed)
    of_rank = [np.argsort(rng.random((num, shape.num_experts)), axis=1)[:, : shape.top_k] for num in num_tokens]
    return [ids // (shape.num_experts // shape.num_ranks) for ids in of_rank]


def table_of(*calls: Sequence[npt.NDArray[np.int64]], node_of_rank: Sequence[int] = NODE_OF_RANK) -> DemandTable:
    totals = []
    for rank in range(len(calls[0])):
        total = DemandTotal()
        for ranks in calls:
            nodes = torch.tensor(node_of_rank)
            demand = demand_of(torch.from_numpy(ranks[rank]), num_ranks=len(ranks), node_of_rank=nodes)
            total.add(demand, num_tokens=len(ranks[rank]))
        totals.append(total.take())
        assert total.take() is None
    return DemandTable.of(torch.stack(totals).numpy())


@pytest.mark.parametrize("mode", [*MODES, "hierarchical"])
@pytest.mark.parametrize("num_tokens", [(40, 40, 40, 40), (30, 7, 0, 50)])
def test_messages_add_up_to_the_traffic(mode: Mode, num_tokens: tuple[int, ...]) -> None:
    ranks = routed(num_tokens)
    exact = [traffic(mode, ranks, SHAPE, node_of_rank=NODE_OF_RANK) for traffic in (forward_traffic, backward_traffic)]
    predicted = list(messages(mode, table_of(ranks), SHAPE, node_of_rank=NODE_OF_RANK))
    assert sum(message.sent for message in predicted).tolist() == sum(t.payload + t.metadata for t in exact).tolist()
    assert all(message.sent.sum() == pytest.approx(message.received.sum()) for message in predicted)


def test_a_table_holds_the_mean_call() -> None:
    first, second = routed((40, 40, 40, 40), seed=1), routed((20, 20, 20, 20), seed=2)
    table, of_first, of_second = table_of(first, second), table_of(first), table_of(second)
    for name in ("pairs", "rows", "rows_to_node", "num_tokens"):
        mean = (getattr(of_first, name) + getattr(of_second, name)) / 2
        assert getattr(table, name).tolist() == mean.tolist()


def seconds_of(
    ranks: Sequence[npt.NDArray[np.int64]], shape: WireShape, links: dict[Way, GroupSpeed]
) -> dict[Mode, float]:
    modes: tuple[Mode, ...] = (*MODES, "hierarchical") if "across" in links else MODES
    table = table_of(ranks)
    return {mode: predicted_seconds(mode, table, shape, links, node_of_rank=NODE_OF_RANK) for mode in modes}


WIDE = WireShape(num_ranks=4, num_experts=16, top_k=3, hidden_size=1024, value_bytes=2)
FAST = GroupSpeed(latency=0.0, bandwidth=1e9)


def test_time_is_latency_and_the_busiest_rank() -> None:
    """Every choice of three ranks lies on rank 0: alltoall, K = 1, so rank 0 receives what the three send."""
    shape = WireShape(num_ranks=4, num_experts=4, top_k=1, hidden_size=500, value_bytes=2, num_facts=0)
    ranks = [np.zeros((10, 1), dtype=np.int64) for _ in range(4)]
    seconds = predicted_seconds("alltoall", table_of(ranks), shape, {"group": GroupSpeed(0.25, 1000.0)})
    header = 8 * 3 / 1000
    assert seconds == pytest.approx(5 * 0.25 + header + 4 * 30 * 1000 / 1000)


def test_skew_costs_alltoall_and_not_allgather() -> None:
    even, skewed = routed((64,) * 4), [np.tile([0, 0, 1], (64, 1)) for _ in range(4)]
    before, after = (seconds_of(ranks, WIDE, {"group": FAST}) for ranks in (even, skewed))
    assert after["alltoall"] > 2 * before["alltoall"]
    assert after["allgather"] == pytest.approx(before["allgather"])


def test_a_slow_link_between_nodes_makes_hierarchical_the_quickest() -> None:
    shape = WireShape(num_ranks=4, num_experts=16, top_k=8, hidden_size=1024, value_bytes=2)
    ranks = routed((64,) * 4, shape)
    slow = GroupSpeed(0.0, 1e7)
    quickest = {
        "slow across": seconds_of(ranks, shape, {"group": slow, "across": slow, "inside": FAST}),
        "all alike": seconds_of(ranks, shape, {"group": FAST, "across": FAST, "inside": FAST}),
    }
    assert min(quickest["slow across"], key=quickest["slow across"].__getitem__) == "hierarchical"
    assert min(quickest["all alike"], key=quickest["all alike"].__getitem__) != "hierarchical"
