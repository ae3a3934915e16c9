"""Each check on hosts that are healthy but for one thing: its line, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from ds_hybrid.doctor.checks import check_facts, check_ranks, check_silence
from ds_hybrid.doctor.facts import HostFacts, Lock, NoFacts
from ds_hybrid.doctor.findings import Finding
from tests.doctor.stand_ins import made_facts, made_gpu_facts

LINKS = [["X", "NV18"], ["NV18", "X"]]
LOCK = Lock("/ext/deepspeed_shm_comm/lock", "7:1000", is_held=False)
PACKAGES = made_facts().packages
LEFT = (
    "no process there holds it, so one that was killed has left it, and whoever needs the extension waits without end. "
    "Remove it."
)
HANGS = (
    "so gloo listens where no other host reaches it, and the run hangs. Give the name its network address in "
    "/etc/hosts, or set GLOO_SOCKET_IFNAME in .deepspeed_env."
)


def hosts(**changes: dict[str, Any]) -> dict[str, HostFacts]:
    return {name: made_facts(name, **of_host) for name, of_host in changes.items()}


def gpu_host(name: str = "g0", **changes: Any) -> HostFacts:
    return made_gpu_facts(name, LINKS, [0, 0], **changes)


@pytest.mark.parametrize(
    ("facts", "findings"),
    [
        (hosts(w0={}), []),
        (hosts(w0={}, w1={}, w2={}), []),
        ({"g0": gpu_host(), "g1": gpu_host("g1")}, []),
        (
            hosts(w0={}, w1={"python": "3.12.1"}, w2={}),
            ["error same python: 3.11.7 on w0, w2; 3.12.1 on w1. Must be the same on all hosts."],
        ),
        (
            hosts(w0={}, w1={"packages": {**PACKAGES, "torch": "2.13.0+cu130"}}),
            ["error same torch: 2.13.0+cpu on w0; 2.13.0+cu130 on w1. Must be the same on all hosts."],
        ),
        (
            hosts(w0={}, w1={"source_digest": "ba9876543210"}),
            [
                "error same ds_hybrid: 0.1.0 (files 0123456789ab) on w0; 0.1.0 (files ba9876543210) on w1. "
                "Must be the same on all hosts."
            ],
        ),
        (
            hosts(w0={}, w1={"packages": {**PACKAGES, "ds_hybrid": None}}),
            [
                "error same ds_hybrid: 0.1.0 (files 0123456789ab) on w0; copy (files 0123456789ab) on w1. "
                "Must be the same on all hosts."
            ],
        ),
        (
            hosts(w0={}, w1={"packages": {**PACKAGES, "transformers": None}}),
            ["warning same transformers: 5.24.0 on w0; none on w1. Must be the same on all hosts."],
        ),
        (
            hosts(w0={}, w1={"ninja": "1.11.1"}, w2={"ninja": "1.11.1"}),
            ["warning same ninja: 1.13.2 on w0; 1.11.1 on w1, w2. Must be the same on all hosts."],
        ),
        (
            hosts(w0={}, w1={"accelerator": "xpu"}),
            [
                "error same accelerator: cpu on w0; xpu on w1. Must be the same on all hosts.",
                'error devices accelerator = "xpu" (w1): DeepSpeed takes it and finds no device of it. '
                "Check the driver, or set DS_ACCELERATOR=cpu.",
            ],
        ),
        (
            hosts(
                w0={"packages": {**PACKAGES, "deepspeed": "0.20.0"}},
                w1={"packages": {**PACKAGES, "deepspeed": "0.20.0"}},
            ),
            ['warning tested deepspeed = "0.20.0" (w0, w1): untested. Tested: 0.19.8.'],
        ),
        (hosts(w0={"packages": {**PACKAGES, "transformers": None}}), []),
        (
            hosts(w0={"failure": "OSError: libcudart.so.13", "accelerator": None, "backend": None, "reports": ()}),
            [
                "error loads torch and deepspeed (w0): do not load: OSError: libcudart.so.13. "
                "Set the environment up again: launch/setup.sh"
            ],
        ),
        (
            hosts(w0={"ninja": None, "compiler": None}),
            [
                f"error tools {tool} (w0): none on PATH, and DeepSpeed compiles deepspeed_shm_comm, without which no "
                "run starts. Install it; on other hosts, .deepspeed_env sets PATH."
                for tool in ("ninja", "C++ compiler")
            ],
        ),
        (
            {"g0": gpu_host(compiler=None), "g1": gpu_host("g1", compiler=None)},
            [
                "warning tools C++ compiler (g0, g1): none on PATH, and DeepSpeed compiles ops such as fused_adam. "
                "Install it; on other hosts, .deepspeed_env sets PATH."
            ],
        ),
        (hosts(w0={"addresses": ("127.0.1.1",)}), []),
        (
            hosts(w0={"addresses": ("127.0.1.1", "192.0.2.1")}, w1={}),
            [f'error own_name host name = "w0" (w0): means 127.0.1.1 there, {HANGS}'],
        ),
        (
            hosts(w0={}, w1={"addresses": (), "host_name": "node-1"}),
            [f'error own_name host name = "node-1" (w1): means nothing there, {HANGS}'],
        ),
        (hosts(w0={}, w1={"addresses": ("fe80::1%eth0",)}), []),
        (hosts(w0={}, w1={"addresses": ("::1",), "gloo_interface": "eth0"}), []),
        (
            {"g0": gpu_host(), "g1": gpu_host("g1", addresses=("::1",))},
            [f'warning own_name host name = "g1" (g1): means ::1 there, {HANGS}'],
        ),
        (
            hosts(w0={"host_key": "k"}, w1={}, w2={"host_key": "k"}),
            [
                "warning machines w0, w2: are one machine, and its ranks would share devices. "
                "Keep one line for it in the hostfile."
            ],
        ),
        (hosts(w0={"locks": (LOCK,)}), [f"error lock {LOCK.path} (w0): {LEFT}"]),
        (hosts(w0={"locks": (Lock(LOCK.path, "7:1000", is_held=True),)}), []),
        # One file on a file system that both share, and one of each host's own.
        (hosts(w0={"locks": (LOCK,)}, w1={"locks": (LOCK,)}), [f"error lock {LOCK.path} (w0, w1): {LEFT}"]),
        (hosts(w0={"locks": (LOCK,)}, w1={"locks": (Lock(LOCK.path, "7:1000", is_held=True),)}), []),
        (
            hosts(w0={"locks": (LOCK,)}, w1={"locks": (Lock(LOCK.path, "8:1000", is_held=True),)}),
            [f"error lock {LOCK.path} (w0): {LEFT}"],
        ),
    ],
)
def test_facts(facts: dict[str, HostFacts], findings: list[str]) -> None:
    assert lines(*check_facts(facts, num_hosts=len(facts))) == findings


def test_the_only_host_that_answers_of_two_must_still_be_reached_by_the_other() -> None:
    facts = hosts(w0={"addresses": ("127.0.1.1",)})
    assert lines(*check_facts(facts, num_hosts=2)) == [
        f'error own_name host name = "w0" (w0): means 127.0.1.1 there, {HANGS}'
    ]


@pytest.mark.parametrize(
    ("slots", "num_gpus", "findings"),
    [
        ({}, None, []),
        ({}, 2, []),
        ({}, 3, ["error slots --num_gpus = 3 (g0): a rank needs a device, and the host has 2. Give 2 at most."]),
        ({"g0": 2, "w0": 9}, None, []),
        ({"g0": 3}, None, ["error slots slots = 3 (g0): a rank needs a device, and the host has 2. Give 2 at most."]),
        ({"g0": 3}, 2, []),
        (
            {"g0": 1, "w0": 2, "gone": 1},
            2,
            [
                f"warning slots --num_gpus = 2 ({name}): the hostfile says slots=1, and DeepSpeed starts 2 ranks all "
                "the same. Give 1 at most, or raise the slots."
                for name in ("g0", "gone")
            ],
        ),
        (
            {"g0": 2},
            4,
            [
                "warning slots --num_gpus = 4 (g0): the hostfile says slots=2, and DeepSpeed starts 4 ranks all the "
                "same. Give 2 at most, or raise the slots.",
                "error slots --num_gpus = 4 (g0): a rank needs a device, and the host has 2. Give 2 at most.",
            ],
        ),
    ],
)
def test_ranks_of_a_host_with_two_gpus_and_one_with_none(
    slots: dict[str, int], num_gpus: int | None, findings: list[str]
) -> None:
    facts = {"g0": gpu_host(), "w0": made_facts()}
    assert lines(*check_ranks(facts, slots=slots, num_gpus=num_gpus)) == findings


def test_silent_hosts() -> None:
    silent = {"w1": NoFacts(False, "Connection refused"), "w2": NoFacts(True, "No module named ds_hybrid")}
    assert lines(*check_silence(silent, login="ssh -o BatchMode=yes", python="/venv/bin/python")) == [
        "error reachable w1 (host): not reachable: Connection refused. "
        "This must work without a question: ssh -o BatchMode=yes w1 true",
        "error reachable w2 (host): /venv/bin/python -m ds_hybrid.doctor.collect failed there: No module named "
        "ds_hybrid. Every host must have the same environment and the current folder, at the same paths.",
    ]


def lines(*findings: Finding) -> list[str]:
    return [f"{finding.severity} {finding.check} {finding.message}" for finding in findings]
