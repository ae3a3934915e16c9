"""Two ranks: real ones, and such as fail in every way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from ds_hybrid.doctor import collective
from ds_hybrid.doctor.collective import Collective, run_collective
from ds_hybrid.doctor.facts import HostFacts, Lock
from ds_hybrid.doctor.locks import find_locks
from ds_hybrid.doctor.processes import Command, Outcome, run_together
from tests.doctor.stand_ins import StandIns, made_facts, made_gpu_facts

ROOT = Path(__file__).parents[2]
EXTENSIONS = ROOT / ".torch_ext"
HERE = made_facts(lock_pattern=str(EXTENSIONS / "*" / "lock"))
OP_LOCK = "deepspeed_shm_comm/lock"


def buffers(port: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))


@pytest.mark.launch
def test_two_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    ports, num_left = [], []

    def noting(commands: Sequence[Command], **limits: float) -> list[Outcome]:
        outcomes = run_together(commands, **limits)
        ports.append(commands[0].environment["MASTER_PORT"])
        num_left.append(len(buffers(ports[0])))
        return outcomes

    monkeypatch.setattr(collective, "run_together", noting)
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(EXTENSIONS)}
    assert run_collective(HERE, environment) == Collective("ok", "2 ranks on cpu, gloo")
    assert num_left == [2], "DeepSpeed no longer leaves its buffers: nothing to remove any more"
    assert buffers(ports[0]) == []
    assert psutil.Process().children() == []


@pytest.mark.launch
def test_ranks_that_find_no_way_to_each_other() -> None:
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(EXTENSIONS), "GLOO_SOCKET_IFNAME": "missing0"}
    failed = run_collective(HERE, environment)
    assert failed.result == "failed"
    assert failed.detail.startswith("2 ranks on cpu, gloo: rank ")
    assert "ended with exit code 1: RuntimeError: " in failed.detail
    assert "missing0" in failed.detail
    assert psutil.Process().children() == []


SLOW = 10.0


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        (
            '[ $RANK = 0 ] && sleep 600; echo "[rank1]: ValueError: no" >&2; exit 3',
            "rank 1 ended with exit code 3: ValueError: no",
        ),
        ("kill -9 $$", "rank 0 ended with exit code -9: no word; rank 1 ended with exit code -9: no word"),
        ("[ $RANK = 0 ] || sleep 600; echo sum 3.0 to 3.0", "rank 1 was not done after 10 seconds"),
        ("echo sum 3.0 to $((RANK + 3)).0", "rank 1 got ['sum 3.0 to 4.0'], must be ['sum 3.0 to 3.0']"),
        ("[ $RANK = 1 ] || echo [INFO] sum 3.0 to 3.0", None),
    ],
)
def test_what_failed(script: str, detail: str | None, stand_ins: StandIns) -> None:
    stand_ins.does("rank", script)
    expected = detail or "; ".join(f"rank {rank} got [], must be ['sum 3.0 to 3.0']" for rank in range(2))
    failed = run_collective(made_facts(), os.environ, time_limit=SLOW)
    assert failed == Collective("failed", f"2 ranks on cpu, gloo: {expected}")


def test_the_ranks_environment_is_a_launchers(stand_ins: StandIns) -> None:
    stand_ins.does("rank", f'env >{stand_ins.folder}/env.$RANK; echo "[INFO] hello"; echo "sum 3.0 to 3.0"')
    done = run_collective(made_facts(), {**os.environ, "MINE": "1", "RANK": "7", "OMP_NUM_THREADS": "3"})
    assert done == Collective("ok", "2 ranks on cpu, gloo")
    told = [(stand_ins.folder / f"env.{rank}").read_text().splitlines() for rank in range(2)]
    for rank, lines in enumerate(told):
        here = {f"RANK={rank}", f"LOCAL_RANK={rank}", "WORLD_SIZE=2", "LOCAL_SIZE=2", "MASTER_ADDR=127.0.0.1"}
        assert {*here, "MINE=1", "OMP_NUM_THREADS=3"} <= set(lines)
    ports = [[line for line in lines if line.startswith("MASTER_PORT=")] for lines in told]
    assert ports[0] == ports[1]


@pytest.mark.parametrize("is_stuck", [True, False])
def test_what_the_ranks_leave_is_removed(is_stuck: bool, stand_ins: StandIns, tmp_path: Path) -> None:
    strangers = tmp_path / "ext" / "fused_adam" / "lock"
    old, new = tmp_path / "ext" / "cpu_adam" / "lock", tmp_path / "ext" / OP_LOCK
    for path in (old, new, strangers):
        path.parent.mkdir(parents=True)
    old.touch()
    pattern = str(tmp_path / "ext" / "*" / "lock")
    stand_ins.does(
        "rank",
        f"echo $MASTER_PORT >{tmp_path}/port; touch /dev/shm/deepspeed_allreduce_buffer_0_here_${{MASTER_PORT}}_0; "
        + (f"touch {strangers}; exec 9>{new}; sleep 600" if is_stuck else "echo sum 3.0 to 3.0"),
    )
    host = made_facts(lock_pattern=pattern, locks=find_locks(pattern))
    assert run_collective(host, os.environ, time_limit=SLOW).result == ("failed" if is_stuck else "ok")
    assert buffers((tmp_path / "port").read_text().strip()) == []
    # A new one that none of the ranks holds is another host's.
    assert (old.exists(), new.exists(), strangers.exists()) == (True, False, is_stuck)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (made_facts(failure="ImportError: no", accelerator=None), "torch or DeepSpeed does not load"),
        (made_gpu_facts("g0", [["X"]], [0]), "needs 2 devices, and this host has 1"),
        (
            made_facts(locks=(Lock(f"/ext/{OP_LOCK}", "1:1", is_held=False),)),
            "would wait without end for the lock of deepspeed_shm_comm",
        ),
    ],
)
def test_what_cannot_run_is_not_tried(host: HostFacts, reason: str, stand_ins: StandIns) -> None:
    stand_ins.does("rank", "exit 1")
    assert run_collective(host, os.environ) == Collective("skipped", reason)


@pytest.mark.parametrize(
    "locks",
    [(Lock(f"/ext/{OP_LOCK}", "1:1", is_held=True),), (Lock("/ext/fused_adam/lock", "1:1", is_held=False),)],
)
def test_other_locks_do_not_hinder(locks: tuple[Lock, ...], stand_ins: StandIns) -> None:
    assert run_collective(made_facts(locks=locks), os.environ).result == "ok"
