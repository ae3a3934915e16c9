"""Runs of the scripts for several hosts, on hosts that are this machine: what reaches the ranks, what stays behind.

tests/hosts has runs over real networks.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.fakes import BIN, LAUNCH, FakeCluster
from tests.launch.test_train import SMALL, Run, free_port, run, started, wait_for

pytestmark = pytest.mark.launch

NUM_STEPS = 2


def test_deepspeed_hands_the_environment_to_every_host(cluster: FakeCluster) -> None:
    """Through DeepSpeed's own reading of the file, and the hosts' shells."""
    (cluster.folder / ".deepspeed_env").write_text("# a comment\n\nMINE=a b  c\n")
    pdsh = (cluster.bin / "pdsh").read_text()
    # The exports, then, in place of the rest, what they did.
    cluster.program("bin/pdsh", pdsh.replace('"${*//%n/$place}"', '"$1 env -0 >$HOME/told.$place"'))
    settings = {"VENV": str(BIN.parent), "INTERFACE": "eth0", "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1"}
    done = cluster.start("run_hostfile.sh", "--deepspeed_config", "ds.json", **settings)
    assert done.returncode == 0, done.stderr
    expected = {
        "PATH": f"{BIN}:{cluster.bin}:/usr/bin:/bin",
        "MASTER_PORT": "29611",
        "OMP_NUM_THREADS": "2",
        "TORCH_EXTENSIONS_DIR": "/ext",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1",
        "MINE": "a b  c",
    }
    for place in range(2):
        told = (cluster.folder / "home" / f"told.{place}").read_text().split("\0")
        assert expected.items() <= {name: value for name, _, value in (item.partition("=") for item in told)}.items()


def test_deepspeed_hands_the_environment_to_open_mpi(cluster: FakeCluster) -> None:
    settings = {"VENV": str(BIN.parent), "INTERFACE": "eth0", "LAUNCHER": "openmpi", "DS_ACCELERATOR": "cuda"}
    (cluster.folder / ".deepspeed_env").write_text("MINE=a,b\n")
    done = cluster.start("run_hostfile.sh", "--deepspeed_config", "my ds.json", **settings)
    assert done.returncode == 0, done.stderr
    (record,) = cluster.records()
    argv = record["argv"]
    exported = [argv[place + 1] for place, word in enumerate(argv) if word == "-x"]
    assert {
        f"PATH={BIN}:{cluster.bin}:/usr/bin:/bin",
        f"MPI4PY_LIBMPI={cluster.folder}/lib:libmpi.so.40",
        "MASTER_PORT=29611",
        "OMP_NUM_THREADS=2",
        "TORCH_EXTENSIONS_DIR=/ext",
        "GLOO_SOCKET_IFNAME=eth0",
        "DS_ACCELERATOR=cuda",
        "MINE=a,b",
    } <= set(exported)
    assert record["env"]["PATH"].startswith(f"{cluster.bin}:")
    script = ["-m", "mpi4py", str(LAUNCH / "train.py"), "--deepspeed_config", "my ds.json"]
    assert argv[-len(script) :] == script
    assert argv.count("btl_tcp_if_include") == 1


def far_launcher(port: str) -> subprocess.Popen[bytes]:
    """A process that calls itself what DeepSpeed starts on a host."""
    name = ["deepspeed.launcher.launch", "--master_addr=w0", f"--master_port={port}", "train.py"]
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *name])


@pytest.mark.parametrize(("deepspeed", "code"), [("touch started; exec sleep 600", 130), ("touch started; exit 3", 3)])
def test_a_run_that_ends_badly_ends_on_all_hosts_and_no_other_run_does(
    cluster: FakeCluster, deepspeed: str, code: int
) -> None:
    port = free_port()
    mine, other = str(port), str(port - 1)
    buffers = [Path(f"/dev/shm/deepspeed_allreduce_buffer_0_w0_{port}_0") for port in (mine, other)]
    for buffer in buffers:
        buffer.touch()
    cluster.program("venv/bin/deepspeed", f"#!/bin/sh\n{deepspeed}\n")
    launchers = [far_launcher(mine), far_launcher(other)]
    try:
        environment = cluster.environment(MASTER_PORT=mine)
        with started([str(LAUNCH / "run_hostfile.sh")], cluster.folder / "output", **environment) as process:
            if code == 130:
                wait_for((cluster.folder / "started").exists, process)
                os.killpg(process.pid, signal.SIGINT)
            assert process.wait(timeout=60) == code
        assert launchers[0].wait(timeout=30) == -signal.SIGTERM
        assert launchers[1].poll() is None
        assert [buffer.exists() for buffer in buffers] == [False, True]
        assert not list(cluster.folder.glob("tmp.*"))
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
        for buffer in buffers:
            buffer.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def pdsh(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on two hosts, over a pdsh whose hosts get nothing but what DeepSpeed sends them."""
    folder = tmp_path_factory.mktemp("pdsh")
    cluster = FakeCluster(folder)
    cluster.fill()
    (folder / "hosts").write_text("w0 slots=1\nw1 slots=1\n")
    settings = {"PATH": f"{cluster.bin}:/usr/bin:/bin", "HOSTFILE": str(folder / "hosts"), "INTERFACE": "lo"}
    return run([str(LAUNCH / "run_hostfile.sh")], folder / "run", "--steps", str(NUM_STEPS), **settings)


def test_pdsh_trains(pdsh: Run) -> None:
    assert pdsh.code == 0, pdsh.output
    assert list(pdsh.losses) == list(range(1, NUM_STEPS + 1))


def test_no_ssh_trains_the_same(pdsh: Run, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("w0 slots=1\nw1 slots=1\n")
    settings = {
        "LAUNCHER": "no_ssh",
        "HOSTFILE": str(tmp_path / "hosts"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [str(LAUNCH / "run_hostfile.sh")]
    options = [*SMALL, "--steps", str(NUM_STEPS)]
    with started([*command, *options], tmp_path / "output", **settings, NODE_RANK="1") as second:
        first = run(command, tmp_path / "run", "--steps", str(NUM_STEPS), **settings, NODE_RANK="0")
        assert second.wait(timeout=60) == 0
    assert first.code == 0, first.output
    assert first.losses == pdsh.losses


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or not (BIN / "mpirun").exists(),
    reason="mpi4py and mpich are not installed: pip install '.[mpi]'",
)
def test_run_mpi_trains_the_same(pdsh: Run, tmp_path: Path) -> None:
    mpi = run([str(LAUNCH / "run_mpi.sh")], tmp_path / "run", "--steps", str(NUM_STEPS), NUM_RANKS="2")
    assert mpi.code == 0, mpi.output
    assert mpi.losses == pdsh.losses
