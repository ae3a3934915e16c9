"""launch/cpu_op.sh and launch/session.sh: which environment compiles, and which lock files are removed."""

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.launch.fakes import LAUNCH, ROOT, FakeCluster

# In the place of python: notes itself, and compiles.
COMPILER = """#!/bin/sh
echo "$0" >>"$RECORD"
touch "$TORCH_EXTENSIONS_DIR/deepspeed_shm_comm/deepspeed_shm_comm.so"
"""


@pytest.fixture
def extensions(cluster: FakeCluster) -> Path:
    """The folder of the op, which nobody has compiled yet."""
    folder = cluster.folder / "ext" / "deepspeed_shm_comm"
    folder.mkdir(parents=True)
    for venv in ("venv", "other"):
        cluster.program(f"{venv}/bin/python", COMPILER)
    return folder


def build(cluster: FakeCluster, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return cluster.start(
        "cpu_op.sh", *(arguments or ["build"]), TORCH_EXTENSIONS_DIR=f"{cluster.folder}/ext", **settings
    )


def compilers(cluster: FakeCluster) -> list[str]:
    record = cluster.folder / "record"
    return (
        [line.removeprefix(f"{cluster.folder}/") for line in record.read_text().splitlines()] if record.exists() else []
    )


def test_venv_compiles_once_and_another_one_again(cluster: FakeCluster, extensions: Path) -> None:
    for _ in range(2):
        assert build(cluster).returncode == 0
    assert compilers(cluster) == ["venv/bin/python"]
    assert build(cluster, VENV=f"{cluster.folder}/other").returncode == 0
    assert compilers(cluster) == ["venv/bin/python", "other/bin/python"]
    stamp = cluster.folder / "other" / ".setup-stamp"
    stamp.touch()
    os.utime(stamp, (time.time() + 5, time.time() + 5))
    assert build(cluster, VENV=f"{cluster.folder}/other").returncode == 0
    assert compilers(cluster)[2:] == ["other/bin/python"]


@pytest.mark.parametrize("script", ["run_hostfile.sh", "run_mpi.sh", "run_local.sh"])
def test_the_scripts_hand_their_venv_on(cluster: FakeCluster, extensions: Path, script: str) -> None:
    """Here to a python that compiles nothing and fails, which ends the script."""
    root = cluster.folder / "root"
    (root / "launch").mkdir(parents=True)
    for path in LAUNCH.glob("*.sh"):
        (root / "launch" / path.name).symlink_to(path)
    cluster.program("root/launch/train.py", "")
    (root / "launch" / "cpu_op.sh").unlink()
    cluster.program("root/launch/cpu_op.sh", f'#!/bin/sh\necho "$VENV" >"{cluster.folder}/told"\nexit 7\n')
    cluster.program("root/.venv/bin/deepspeed", "#!/bin/sh\n")
    cluster.program("root/.venv/bin/python", f'#!/bin/sh\nexec {cluster.folder}/python "$@"\n')
    cluster.program("python", f'#!/bin/sh\nexec {ROOT}/.venv/bin/python "$@"\n')
    arguments = ["2", str(root / "launch" / "train.py")] if script == "run_local.sh" else []
    for venv in ("", f"{root}/.venv"):
        environment = {
            **cluster.environment(VENV=venv),
            "DS_ACCELERATOR": "cpu",
            "HOSTFILE": str(cluster.folder / "hosts"),
        }
        done = subprocess.run(
            [root / "launch" / script, *arguments], cwd=cluster.folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 7, done.stderr
        assert (cluster.folder / "told").read_text() == f"{root}/.venv\n"
        (cluster.folder / "told").unlink()


def test_a_lock_older_than_a_build_may_take_is_removed(cluster: FakeCluster, extensions: Path) -> None:
    lock = extensions / "lock"
    lock.touch()
    os.utime(lock, (time.time() - 100, time.time() - 100))
    done = build(cluster, BUILD_TIME_LIMIT="50")
    assert (done.returncode, done.stderr) == (0, "")
    assert not lock.exists()
    assert compilers(cluster) == ["venv/bin/python"]


@pytest.mark.parametrize("is_old", [False, True])
def test_another_lock_is_waited_for(cluster: FakeCluster, extensions: Path, is_old: bool) -> None:
    """A young one, which another host may hold; an old one that somebody here holds."""
    lock = extensions / "lock"
    age = 100 if is_old else 0
    with lock.open("w") as held:
        os.utime(lock, (time.time() - age, time.time() - age))
        if not is_old:
            held.close()
        environment = cluster.environment(TORCH_EXTENSIONS_DIR=f"{cluster.folder}/ext", BUILD_TIME_LIMIT="50")
        with subprocess.Popen(
            [LAUNCH / "cpu_op.sh", "build"], cwd=cluster.folder, env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == (
                f"launch/cpu_op.sh: {lock}: waits for its maker, until the file is 50 s old. "
                "If no process on any host compiles or loads this op, remove the file.\n"
            )
            assert lock.exists()
            assert not compilers(cluster)
            lock.unlink()
            assert process.wait(timeout=60) == 0
    assert compilers(cluster) == ["venv/bin/python"]


def test_wrong_usage(cluster: FakeCluster) -> None:
    for told, message in (
        (build(cluster, "unlock"), "argument 'unlock': the only one is build."),
        (
            build(cluster, VENV="/none"),
            "VENV = /none: no bin/python there. Run launch/setup.sh, or name another environment.",
        ),
    ):
        assert (told.returncode, told.stderr) == (2, f"launch/cpu_op.sh: {message}\n")


def in_bash(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A script that has sourced session.sh."""
    head = f"set -euo pipefail; root={ROOT}; source {LAUNCH}/session.sh; "
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder / "ext")}
    return subprocess.run(
        ["bash", "-c", head + script], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_session_that_is_ended_leaves_none_of_its_locks(tmp_path: Path) -> None:
    ours, stranger = tmp_path / "ext" / "a" / "lock", tmp_path / "ext" / "b" / "lock"
    for path in (ours, stranger):
        path.parent.mkdir(parents=True)
    stranger.touch()
    script = f"""
        setsid bash -c 'exec 9>{ours}; trap "" TERM; sleep 600; sleep 600' &
        session=$!
        until [ -e {ours} ]; do sleep 0.1; done
        end_session"""
    done = in_bash(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (ours.exists(), stranger.exists()) == (False, True)


@pytest.mark.parametrize("call", ["kill_leader", "end_session"])
def test_a_stranger_with_the_id_of_the_leader_lives_on(tmp_path: Path, call: str) -> None:
    """As after the leader's end, when the kernel gives its id to another process."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        try:
            done = in_bash(f"session={stranger.pid}; session_start=1; {call}; echo ended", tmp_path)
            assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
            assert psutil.Process(stranger.pid).status() != psutil.STATUS_ZOMBIE
            assert stranger.poll() is None
            # The same, of the session itself.
            start = in_bash(f"start_of {stranger.pid}", tmp_path).stdout.strip()
            done = in_bash(f"session={stranger.pid}; session_start={start}; {call}", tmp_path)
            assert done.returncode == 0, done.stderr
            assert stranger.wait(timeout=30) < 0
        finally:
            stranger.kill()
