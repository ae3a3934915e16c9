"""The whole examination, over hosts that stand in: what comes together of all its parts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ds_hybrid.doctor import examination
from ds_hybrid.doctor.collective import Collective
from ds_hybrid.doctor.examination import examine
from ds_hybrid.doctor.report import Report
from tests.doctor.stand_ins import StandIns, made_facts, made_gpu_facts

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}
PARALLEL: dict[str, Any] = {**CONFIG, "expert_parallel": {"enabled": True, "autoep_size": 2}}
OK = Collective("ok", "2 ranks on cpu, gloo")
CONFIG_PATH, HOSTS = Path("ds.json"), Path("hosts")


def lines(report: Report) -> list[str]:
    return [f"{one.severity} {one.check} {one.message}" for one in report.findings]


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch, stand_ins: StandIns) -> None:
    monkeypatch.setattr(examination, "DEFAULT_HOSTFILE", Path("job_hosts"))


def test_this_host(stand_ins: StandIns) -> None:
    told: list[str] = []
    report = examine(tell=told.append)
    assert (report.hosts, report.ranks) == ({"here": made_facts("here")}, {"here": 1})
    assert (report.collective, report.findings, report.exit_status) == (OK, (), 0)
    assert report.topology.source == "none (the accelerator is cpu)"
    assert told == ["asking this host", "starting two ranks on this host; DeepSpeed may first compile an op"]


def test_this_host_has_a_rank_for_each_device(stand_ins: StandIns) -> None:
    stand_ins.tells("here", made_gpu_facts("here", [["X", "NV18"], ["NV18", "X"]], [0, 0]))
    CONFIG_PATH.write_text(json.dumps(PARALLEL))
    report = examine(config=CONFIG_PATH)
    assert (report.ranks, lines(report)) == ({"here": 2}, [])
    assert report.topology.layout is not None
    assert report.topology.layout.ep_groups == ((0, 1),)
    assert report.collective == Collective("ok", "2 ranks on cuda, nccl")


def test_a_host_that_cannot_ask_itself(stand_ins: StandIns) -> None:
    stand_ins.does("here", "echo 'MemoryError: none left' >&2; exit 1")
    report = examine()
    (line,) = lines(report)
    assert "-m ds_hybrid.doctor.collect failed there: MemoryError: none left." in line
    assert report.collective == Collective("skipped", "this host cannot be asked: MemoryError: none left")
    assert report.exit_status == 2


def test_hosts_of_a_hostfile(stand_ins: StandIns) -> None:
    HOSTS.write_text("here slots=2\nw1 slots=2\nw2 slots=2\n")
    CONFIG_PATH.write_text(json.dumps(PARALLEL))
    (Path.home() / ".deepspeed_env").write_text("PATH=/opt/bin:$PATH\n# mine\n")
    stand_ins.tells("w1", made_facts("w1", ninja="1.11.1", addresses=("127.0.1.1",)))
    stand_ins.refuses("w2", "Host key verification failed.\n")
    report = examine(hostfile=HOSTS, config=CONFIG_PATH)
    assert list(report.hosts) == ["here", "w1", "w2"]
    assert report.ranks == {"here": 2, "w1": 2, "w2": 2}
    assert lines(report) == [
        "error reachable w2 (host): not reachable: Host key verification failed. "
        "This must work without a question: ssh -o BatchMode=yes -o ConnectTimeout=10 -- w2 true",
        'error own_name host name = "w1" (w1): means 127.0.1.1 there, so gloo listens where no other host reaches it, '
        "and the run hangs. Give the name its network address in /etc/hosts, or set GLOO_SOCKET_IFNAME in "
        ".deepspeed_env.",
        f'warning env_file line 2 = "# mine" ({Path.home()}/.deepspeed_env): DeepSpeed fails at a comment or blank '
        "line; launch/run_hostfile.sh leaves it out. Remove it.",
        "warning same ninja: 1.13.2 on here; 1.11.1 on w1. Must be the same on all hosts.",
    ]
    assert report.topology.layout is not None
    assert report.topology.layout.ep_groups == ((0, 1), (2, 3), (4, 5))
    assert report.collective == OK
    assert len(stand_ins.logins) == 3


def test_a_host_that_only_starts_others_runs_nothing_itself(stand_ins: StandIns) -> None:
    stand_ins.tells("w0", made_facts("w0"))
    Path("job_hosts").write_text("w0 slots=4 max_slots=8\n")
    report = examine(num_gpus=6)
    assert report.ranks == {"w0": 6}
    assert report.collective == Collective("skipped", "this host is none of those that answered")
    assert lines(report) == [
        'warning hostfile line 1 = "w0 slots=4 max_slots=8" (job_hosts): DeepSpeed ignores Open MPI\'s max_slots. '
        "Remove it.",
        "warning slots --num_gpus = 6 (w0): the hostfile says slots=4, and DeepSpeed starts 6 ranks all the same. "
        "Give 4 at most, or raise the slots.",
    ]
    assert report.exit_status == 1


def test_no_pdsh(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "pdsh" else which(name))
    for name in ("w0", "w1"):
        stand_ins.tells(name, made_facts(name))
    HOSTS.write_text("w0 slots=1\n")
    assert lines(examine(hostfile=HOSTS)) == []
    HOSTS.write_text("w0 slots=1\nw1 slots=1\n")
    assert lines(examine(hostfile=HOSTS)) == [
        "warning launcher pdsh: not on PATH here, and DeepSpeed starts several hosts with it. "
        "Install it, or give another --launcher."
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "error hostfile hosts: no such file, and DeepSpeed would go on with this host alone. Check the path."),
        ("# none\n", "error hostfile hosts: holds no host. Write one a line, such as: worker-0 slots=8"),
        (
            "w0:4\n",
            "error hostfile line 1 = \"w0:4\" (hosts): must be NAME slots=NUMBER; the colon is Horovod's and MPICH's. "
            "Write: w0 slots=4",
        ),
    ],
)
def test_a_hostfile_that_names_no_hosts(text: str | None, line: str, stand_ins: StandIns) -> None:
    if text is not None:
        HOSTS.write_text(text)
    report = examine(hostfile=HOSTS)
    assert (list(report.hosts), report.exit_status) == (["here"], 2)
    assert lines(report) == [line]


def test_no_hostfile_on_purpose(stand_ins: StandIns) -> None:
    Path("job_hosts").write_text("w0 slots=1\n")
    (Path.home() / ".deepspeed_env").write_text("\n")
    report = examine(hostfile=Path(os.devnull))
    assert list(report.hosts) == ["here"]
    assert [line.partition(" (")[0] for line in lines(report)] == ['warning env_file line 1 = ""']


@pytest.mark.parametrize(
    ("document", "findings"),
    [
        (PARALLEL, []),
        (
            {**PARALLEL, "zero_optimisation": {}, "expert_parallel": {"enabled": True, "autoep_size": 3}},
            [
                'error config zero_optimisation (ds.json): unknown key. Did you mean "zero_optimization"?',
                "error config expert_parallel.autoep_size = 3 (ds.json): must divide world_size 4. "
                "Values that work: 1, 2, 4.",
            ],
        ),
        (
            {"train_batch_size": 4},
            [
                "warning config gradient_clipping (ds.json): missing, and DeepSpeed 0.19.8 then clips at 1.0. "
                "Set it (0.0 turns clipping off)."
            ],
        ),
        (None, ["error config ds.json: No such file or directory. Check the path."]),
    ],
)
def test_config(document: dict[str, Any] | None, findings: list[str], stand_ins: StandIns) -> None:
    if document is not None:
        CONFIG_PATH.write_text(json.dumps(document))
    report = examine(num_gpus=4, config=CONFIG_PATH)
    assert lines(report) == findings
    assert (report.topology.layout is None) == any(line.startswith("error") for line in findings)


def test_findings_of_the_topology_and_the_collective(stand_ins: StandIns) -> None:
    links = [["X", "NV18", "SYS"], ["NV18", "X", "SYS"], ["SYS", "SYS", "X"]]
    stand_ins.tells("here", made_gpu_facts("here", links, [0, 0, 1]))
    stand_ins.does("rank", "echo 'RuntimeError: NCCL' >&2; exit 1")
    assert lines(examine()) == [
        "error collective collective: 2 ranks on cuda, nccl: rank 0 ended with exit code 1: RuntimeError: NCCL; "
        "rank 1 ended with exit code 1: RuntimeError: NCCL.",
        "warning topology rank 2 (GPU 2 of host here): no NVLink to any rank, while 2 ranks of the host have some. "
        "It stands apart. Check: nvidia-smi nvlink -s",
    ]
