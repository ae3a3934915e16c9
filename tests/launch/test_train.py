"""Runs of launch/train.py under each launcher, as a user starts them."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ds_hybrid.observe.run_directory import read_events

pytestmark = pytest.mark.launch

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TRAIN = str(ROOT / "launch" / "train.py")
RUN_LOCAL = [str(ROOT / "launch" / "run_local.sh"), "2", TRAIN]
CONFIG = ROOT / "ds_configs" / "two_stage_zero1.json"
SMALL = ["--deepspeed_config", str(CONFIG), "--seq-len", "64", "--eval-batches", "2"]
TIME_LIMIT = 180
NUM_STEPS = 12


@dataclass(frozen=True)
class Run:
    """What a finished run said: its exit code, all it printed, the losses it logged by step; and where it ran."""

    code: int
    output: str
    losses: dict[int, float]
    folder: Path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def started(command: list[str], output: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command, as leader of its own process group; ended with all its children if it still runs at the end."""
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(ROOT / ".torch_ext"),
        "MASTER_PORT": str(free_port()),
        **environment,
    }
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=output.parent, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
    children: list[psutil.Process] = []
    try:
        yield process
    finally:
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            psutil.wait_procs([psutil.Process(process.pid), *children], timeout=15)
            for child in children:
                if child.is_running():
                    child.kill()
        process.wait()


def run(command: list[str], folder: Path, *options: str, **environment: str) -> Run:
    folder.mkdir()
    output, log = folder / "output", folder / "log.jsonl"
    with started([*command, *SMALL, "--log-file", str(log), *options], output, **environment) as process:
        process.wait(timeout=TIME_LIMIT)
    lines = log.read_text().splitlines() if log.exists() else []
    losses = {record["step"]: record["loss"] for record in map(json.loads, lines)}
    return Run(process.returncode, output.read_text(), losses, folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All the steps in one go, by the quickstart, under the deepspeed launcher."""
    quickstart = [str(ROOT / "launch" / "quickstart.sh")]
    options = ("--steps", str(NUM_STEPS), "--run-dir", "events")
    return run(quickstart, tmp_path_factory.mktemp("deepspeed") / "run", *options)


@dataclass(frozen=True)
class Half:
    run: Run
    checkpoint: Path


@pytest.fixture(scope="module")
def half(whole: Run, tmp_path_factory: pytest.TempPathFactory) -> Half:
    """The first half of the steps, under torchrun, saved."""
    folder = tmp_path_factory.mktemp("torchrun")
    command = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", TRAIN]
    steps = str(NUM_STEPS // 2)
    return Half(run(command, folder / "run", "--steps", steps, "--save", str(folder / "saved")), folder / "saved")


def test_the_loss_falls_and_a_summary_tells(whole: Run) -> None:
    assert whole.code == 0, whole.output
    assert list(whole.losses) == list(range(1, NUM_STEPS + 1))
    assert whole.losses[NUM_STEPS] < 0.8 * whole.losses[1]
    found = re.search(
        r"held-out loss +(?P<first>[\d.]+) -> (?P<last>[\d.]+) \([\d.]+ -> [\d.]+ bits per byte\)\n"
        r"tokens per second +(?P<speed>[\d,]+)\n"
        r"wire bytes per token +[\d,]+ \((?P<ratio>[\d.]+) x the lower bound\)\n"
        r"expert load +(?P<load>[\d.]+) max/mean\n",
        whole.output,
    )
    assert found is not None, whole.output
    assert float(found["last"]) < 0.8 * float(found["first"])
    assert 1 <= float(found["ratio"]) <= 1.05
    assert 1 <= float(found["load"]) <= 4  # 8 experts, 2 of them for each token


def test_its_events_have_the_same_losses(whole: Run) -> None:
    """The balance loss, which is part of what is trained on, is small."""
    (record,) = read_events(whole.folder / "events").steps
    first_ten = [loss for step, loss in whole.losses.items() if step <= 10]
    assert record.step == 10
    assert record.loss == pytest.approx(sum(first_ten) / 10, abs=0.1)


def test_torchrun_trains_the_same(whole: Run, half: Half) -> None:
    assert half.run.code == 0, half.run.output
    assert half.run.losses == {step: loss for step, loss in whole.losses.items() if step <= NUM_STEPS // 2}


def test_a_resumed_run_goes_on_exactly(whole: Run, half: Half, tmp_path: Path) -> None:
    rest = run(RUN_LOCAL, tmp_path / "run", "--steps", str(NUM_STEPS), "--resume", str(half.checkpoint))
    assert rest.code == 0, rest.output
    assert rest.losses == {step: loss for step, loss in whole.losses.items() if step > NUM_STEPS // 2}


def test_sequences_over_the_ranks_train_the_same(whole: Run, tmp_path: Path) -> None:
    """Both ranks share all windows of a global batch. The balance loss, taken over all of them at once, is another."""
    config = json.loads(CONFIG.read_text()) | {"train_micro_batch_size_per_gpu": 8, "sequence_parallel_size": 2}
    config["ds_hybrid"]["attention"]["kv_gather"] = "auto"
    file = tmp_path / "shared.json"
    file.write_text(json.dumps(config))
    options = ["--deepspeed_config", str(file), "--eval-batches", "1"]
    shared = run(RUN_LOCAL, tmp_path / "run", "--steps", str(NUM_STEPS), *options)
    assert shared.code == 0, shared.output
    assert shared.losses == pytest.approx(whole.losses, abs=2e-3)
    held_out = r"step \d+: held-out loss ([\d.]+)"
    assert float(re.findall(held_out, shared.output)[-1]) < 0.8 * shared.losses[1]


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or not (BIN / "mpirun").exists(),
    reason="mpi4py and mpich are not installed: pip install '.[mpi]'",
)
def test_mpirun_trains_the_same(whole: Run, tmp_path: Path) -> None:
    mpi = run([str(BIN / "mpirun"), "-np", "2", sys.executable, TRAIN], tmp_path / "run", "--steps", "3")
    assert mpi.code == 0, mpi.output
    assert mpi.losses == {step: loss for step, loss in whole.losses.items() if step <= 3}


def test_a_mistake_is_told_once_and_ends_all_ranks(tmp_path: Path) -> None:
    wrong = run(RUN_LOCAL, tmp_path / "run", "--model", "tiny_qwen")
    assert wrong.code == 2, wrong.output
    message = "launch/train.py: --model tiny_qwen: neither a name nor a file. Give one of tiny_qwen3_moe, tiny_mixtral"
    assert wrong.output.count(message) == 1
    assert "Traceback" not in wrong.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "/missing"], "--text /missing: no such file or folder"),
        (["--seq-len", "5000"], "--model tiny_qwen3_moe: max_position_embeddings = 4096, but --seq-len takes 5000"),
        (["--deepspeed_config", "/missing.json"], "/missing.json"),
    ],
)
def test_other_mistakes(tmp_path: Path, options: list[str], message: str) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    wrong = run([sys.executable, TRAIN], tmp_path / "run", *options, **alone)
    assert wrong.code == 2, wrong.output
    assert message in wrong.output
    assert "Traceback" not in wrong.output


@pytest.mark.parametrize("when", ["training", "compiling"])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, when: str) -> None:
    port, log = free_port(), tmp_path / "log.jsonl"
    extensions = ROOT / ".torch_ext" if when == "training" else tmp_path / "extensions"
    lock = extensions / "deepspeed_shm_comm" / "lock"
    sign = log if when == "training" else lock
    command = [*RUN_LOCAL, *SMALL, "--log-file", str(log)]
    environment = {"MASTER_PORT": str(port), "TORCH_EXTENSIONS_DIR": str(extensions)}
    with started(command, tmp_path / "output", **environment) as process:
        wait_for(lambda: sign.exists() and (sign is lock or sign.stat().st_size > 0), process)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        # As a terminal does: to the foreground process group.
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=30) == 130
    assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not lock.exists()
    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while not condition():
        assert process.poll() is None, f"ended early, with exit code {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.1)
