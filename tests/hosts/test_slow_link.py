"""Two hosts whose link carries 100 Mbit/s: what the automatic choices are worth."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from tests.hosts.lab import LAUNCH, Lab

pytestmark = pytest.mark.launch

LIMIT = ("tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms")


@pytest.fixture
def slow_lab(lab: Lab) -> Lab:
    for host in lab.hosts:
        try:
            lab.call("slow", host, *LIMIT)
        except RuntimeError as error:
            pytest.skip(f"no slow link here: {error}")
    return lab


def test_automatic_groups_and_dispatcher_beat_strided_groups(slow_lab: Lab, tmp_path: Path) -> None:
    script = str(LAUNCH.parent / "tests" / "hosts" / "race.py")
    hostfile = str(slow_lab.hostfile(tmp_path, slots=2))
    run = slow_lab.run([str(LAUNCH / "run_hostfile.sh")], tmp_path, HOSTFILE=hostfile, SCRIPT=script)
    assert run.code == 0, run.output
    report, *_ = run.reports()
    assert report["groups"] == {"automatic": [[0, 1], [2, 3]], "strided": [[0, 2], [1, 3]]}
    seconds = {name: median(steps) for name, steps in report["seconds"].items()}
    ratio = seconds["automatic"] / seconds["strided"]
    print(f"median step, automatic ({report['modes']['automatic']}) / strided (alltoall): {seconds} = {ratio:.3f}")
    assert ratio < 1
