"""The launchers that reach other hosts, each in its own way, train the same."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts.lab import BIN, LAUNCH, ROOT, SMALL, Lab

pytestmark = pytest.mark.launch

NUM_STEPS = 5
OMPI_INFO = shutil.which("ompi_info")
OPEN_MPI = str(Path(OMPI_INFO or "/").parent / "mpirun")

needs_mpi4py = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="not installed: mpi4py")
needs_open_mpi = pytest.mark.skipif(OMPI_INFO is None, reason="not installed: Open MPI (Debian: openmpi-bin)")
needs_mpich = pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="not installed: mpich (pip install '.[mpi]')")


@dataclass(frozen=True)
class Training:
    losses: dict[int, float]
    output: str


def train(lab: Lab, folder: Path, script: str, **settings: str) -> Training:
    config = json.loads((ROOT / "ds_configs" / "two_stage_zero1.json").read_text())
    del config["scheduler"]  # it would begin with steps that change nothing
    (folder / "ds.json").write_text(json.dumps(config))
    log = folder / "log.jsonl"
    options = ["--deepspeed_config", "ds.json", *SMALL, "--steps", str(NUM_STEPS), "--log-file", str(log)]
    command = [str(LAUNCH / script), *options]
    run = lab.run(command, folder, HOSTFILE=str(lab.hostfile(folder, slots=2)), INTERFACE="eth0", **settings)
    assert run.code == 0, run.output
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return Training({record["step"]: record["loss"] for record in records}, run.output)


@pytest.fixture(scope="module")
def pdsh(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Training:
    return train(lab, tmp_path_factory.mktemp("pdsh"), "run_hostfile.sh")


def test_pdsh_trains(pdsh: Training) -> None:
    assert list(pdsh.losses) == list(range(1, NUM_STEPS + 1))
    assert pdsh.losses[NUM_STEPS] < pdsh.losses[1]


@pytest.mark.parametrize(
    ("script", "settings"),
    [
        pytest.param(
            "run_hostfile.sh", {"LAUNCHER": "openmpi"}, marks=[needs_mpi4py, needs_open_mpi], id="openmpi launcher"
        ),
        pytest.param("run_mpi.sh", {"MPIRUN": OPEN_MPI}, marks=[needs_mpi4py, needs_open_mpi], id="mpirun of Open MPI"),
        pytest.param(
            "run_mpi.sh", {"MPIRUN": str(BIN / "mpirun")}, marks=[needs_mpi4py, needs_mpich], id="mpirun of MPICH"
        ),
    ],
)
def test_other_launchers_train_the_same(
    lab: Lab, pdsh: Training, tmp_path: Path, script: str, settings: dict[str, str]
) -> None:
    assert train(lab, tmp_path, script, **settings).losses == pdsh.losses
