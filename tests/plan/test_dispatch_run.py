"""Many demands at once, against the dispatchers' messages one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds_hybrid.dispatch.modes import Mode
from ds_hybrid.dispatch.predict import DemandTable, GroupSpeed, Way, messages, predicted_seconds
from ds_hybrid.dispatch.traffic import WireShape
from ds_hybrid.plan.dispatch_run import Demands, dispatch_run

IN_FORWARD = {
    "alltoall": (0, 1, 2),
    "allgather": (0, 1, 2, 4, 5),
    "two_stage": (0, 1, 2, 3),
    "hierarchical": (0, 1, 2, 3, 4, 5, 8, 9),
}
"""Places of forward's messages among all of them: headers, ids, (routing weights,) dispatch, combine."""


@pytest.mark.parametrize("wire_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("mode", ["alltoall", "allgather", "two_stage", "hierarchical"])
def test_an_exchange_costs_what_following_each_message_gives(mode: Mode, wire_dtype: Any) -> None:
    """Uneven demand, also with a rank that hardly anybody needs; 2 nodes of 4 ranks."""
    rng = np.random.default_rng(0)
    pairs, rows, to_node = 2 * rng.dirichlet(np.ones(8), 5), rng.random((5, 8)), rng.random((5, 2))
    shape = WireShape(8, 64, 2, 512, 2, wire_dtype=wire_dtype)
    links: dict[Way, GroupSpeed] = {
        "group": GroupSpeed(1e-5, 3e9),
        "across": GroupSpeed(3e-5, 1e9),
        "inside": GroupSpeed(1e-6, 2e10),
    }
    nodes = (0,) * 4 + (1,) * 4
    run = dispatch_run(mode, Demands(pairs, rows, to_node), 100.0, shape, links)
    for step in range(5):
        to_each, to_ranks, to_nodes = (100.0 * np.tile(each[step], (8, 1)) for each in (pairs, rows, to_node))
        table = DemandTable(to_each, to_ranks, to_nodes, np.full(8, 100.0))
        seconds = predicted_seconds(mode, table, shape, links, node_of_rank=nodes)
        each = list(messages(mode, table, shape, node_of_rank=nodes))
        sent = sum(float(one.sent.sum()) for one in each)
        assert run.seconds[step] == pytest.approx(seconds, rel=1e-12)
        assert run.wire_bytes[step] == pytest.approx(sent, rel=1e-12)
        forward = [each[place] for place in IN_FORWARD[mode]]
        sent = sum(float(one.sent.sum()) for one in forward)
        took = [links[m.way].latency + max(m.sent.max(), m.received.max()) / links[m.way].bandwidth for m in forward]
        assert run.forward_bytes[step] == pytest.approx(sent, rel=1e-12)
        assert run.forward_seconds[step] == pytest.approx(sum(took), rel=1e-12)
        again = run.with_forwards(2)
        assert again[0][step] == pytest.approx(seconds + sum(took))
        assert again[1][step] == pytest.approx(run.wire_bytes[step] + sent)


def test_one_rank_exchanges_nothing() -> None:
    demands = Demands(np.full((3, 1), 2.0), np.ones((3, 1)), np.ones((3, 1)))
    run = dispatch_run("alltoall", demands, 100.0, WireShape(1, 8, 2, 64, 2), {"group": GroupSpeed(1.0, 1.0)})
    assert run.seconds.tolist() == run.wire_bytes.tolist() == [0.0] * 3
