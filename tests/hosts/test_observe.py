"""A run over two hosts that share no files, written down on the one where rank 0 is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_hybrid.dispatch.traffic import WireShape, backward_traffic, forward_traffic
from ds_hybrid.observe.events import StepRecord
from ds_hybrid.observe.run_directory import find_timelines, read_events
from ds_hybrid.rebalance.trace import read_trace
from tests.hosts.lab import LAUNCH, Lab
from tests.hosts.observed import INTERVAL, NUM_STEPS, SIZES

pytestmark = pytest.mark.launch

SHAPE = WireShape(4, SIZES.num_experts, SIZES.top_k, SIZES.hidden_size, value_bytes=4)


def test_rank_0_writes_what_the_ranks_of_both_hosts_did(lab: Lab, tmp_path: Path) -> None:
    """It is on the second host, and the first one, which starts the run, has another disk at that place."""
    folder = tmp_path / "run"
    folder.mkdir()
    hostfile = tmp_path / "hosts"
    hostfile.write_text("w1 slots=2\nw0 slots=2\n")
    script = str(LAUNCH.parent / "tests" / "hosts" / "observed.py")
    lab.call("exec", "w0", "mount", "-t", "tmpfs", "none", str(folder))
    try:
        run = lab.run([str(LAUNCH / "run_hostfile.sh"), str(folder)], tmp_path, HOSTFILE=str(hostfile), SCRIPT=script)
        assert run.code == 0, run.output
        assert lab.call("exec", "w0", "ls", str(folder)) == ""
    finally:
        lab.call("exec", "w0", "umount", str(folder))
    reports = run.reports()
    assert [report["host"] for report in reports] == ["w1", "w1", "w0", "w0"]
    # At the start and at each record, and this count itself; the second rank of a host reads none.
    assert [report["readings"] for report in reports] == [3, 0, 3, 0]

    read = read_events(folder)
    (begun,) = read.runs
    assert (begun.node_of_rank, begun.nvlink) == (("w1", "w1", "w0", "w0"), None)
    assert [record.step for record in read.steps] == [2, 4]
    ids = np.array([report["ids"] for report in reports])  # [R, steps, T, K]
    for record in read.steps:
        check(record, ids[:, record.step - INTERVAL : record.step], reports)
    counts = [[np.bincount(ids[:, step].ravel(), minlength=SIZES.num_experts).tolist()] for step in range(NUM_STEPS)]
    assert read_trace(folder).counts.tolist() == counts
    timeline = find_timelines(folder).read(4)
    for rank in range(4):
        passes = [span.name for span in timeline.spans(rank) if span.layer is None and span.name != "rebalance"]
        assert passes == ["forward", "backward", "optimizer"]


def check(record: StepRecord, ids: np.ndarray, reports: list[dict[str, Any]]) -> None:
    """``ids`` are [R, steps, T, K] choices."""
    steps = slice(record.step - INTERVAL, record.step)
    assert record.loss == pytest.approx(np.mean([report["losses"][steps] for report in reports]), rel=1e-6)
    (layer,) = record.layers
    assert list(layer.load) == np.bincount(ids.ravel(), minlength=SIZES.num_experts).tolist()
    wire = bound = 0
    for step in range(INTERVAL):
        choices = list(ids[:, step] // (SIZES.num_experts // 4))
        for traffic in (
            forward_traffic("two_stage", choices, SHAPE),
            backward_traffic("two_stage", choices, SHAPE),
        ):
            wire += int((traffic.payload + traffic.metadata).sum())
            bound += int(traffic.lower_bound.sum())
    assert (layer.wire_bytes, layer.lower_bound) == ({"two_stage": wire}, bound)
    assert [(gpu.host, gpu.gpu, gpu.sent, gpu.received, gpu.fraction) for gpu in record.nvlink] == [
        ("w1", 0, 1000, 500, 0.1),
        ("w0", 0, 2000, 1000, 0.2),
    ]
