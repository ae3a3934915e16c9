"""Hostfiles of DeepSpeed: what it accepts rightly gives the same hosts here; all else is an error with its fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.launcher.runner import _parse_hostfile

from ds_hybrid.errors import TopologyError
from ds_hybrid.problems import Problem
from ds_hybrid.topology.hostfile import HostSlots, parse_hostfile, read_hostfile
from tests.topology.machines import DATA

HOSTFILES = DATA / "hostfiles"


@pytest.mark.parametrize(
    ("file", "hosts", "warnings"),
    [
        ("plain_workers.txt", {"worker-0": 8, "worker-1": 8}, []),
        ("trailing_spaces.txt", {"192.0.2.10": 8, "192.0.2.11": 8}, []),
        ("comment_and_ips.txt", {"192.0.2.100": 2, "192.0.2.101": 2}, []),
        ("fqdn_k8s.txt", {"ddp-0.ddp.team.svc.cluster.local": 2, "ddp-1.ddp.team.svc.cluster.local": 2}, []),
        ("crlf.txt", {"worker-0": 4, "worker-1": 4}, []),
        ("inline_comment.txt", {"worker-0": 2, "worker-1": 2}, []),
        (
            "localhost_plus_one.txt",
            {"localhost": 2, "node-b": 2},
            ['line 1 = "localhost" (F): is another machine on each host. Write the name by which the others reach it.'],
        ),
    ],
)
def test_files_that_deepspeed_accepts_rightly(file: str, hosts: dict[str, int], warnings: list[str]) -> None:
    text = (HOSTFILES / file).read_bytes().decode()
    read = parse_hostfile(text, name="F")
    assert read.hosts == tuple(HostSlots(name, count) for name, count in hosts.items())
    assert list(read.warnings) == warnings
    assert dict(_parse_hostfile(text.splitlines())) == hosts
    assert read_hostfile(HOSTFILES / file).hosts == read.hosts


MUST_BE = 'must be NAME slots=NUMBER, a whole number and no blanks around "=". Write, say: '
COLON = "must be NAME slots=NUMBER; the colon is Horovod's and MPICH's. Write: "
NO_USER = 'is no name of a user. Write letters, digits, ".", "-" and "_", or put it in the ssh config.'
IGNORES = "Write NAME slots=NUMBER alone."


@pytest.mark.parametrize(
    ("file", "problems"),
    [
        (
            "duplicate.bad.txt",
            [
                'line 2 = "worker-0 slots=2" (F): the host of line 1 again. Keep one line for a host, '
                "with all its slots."
            ],
        ),
        (
            "horovod_colon.bad.txt",
            [f'line 1 = "server1:4" (F): {COLON}server1 slots=4', f'line 2 = "server2:4" (F): {COLON}server2 slots=4'],
        ),
        (
            "names_only.bad.txt",
            [f'line 1 = "host1" (F): {MUST_BE}host1 slots=8', f'line 2 = "host2" (F): {MUST_BE}host2 slots=8'],
        ),
        (
            "slots_zero.txt",
            ['line 2 = "worker-1 slots=0" (F): a host without ranks. Give it at least one slot, or remove the line.'],
        ),
        ("typo_lots.bad.txt", [f'line 2 = "192.0.2.11 lots=8" (F): {MUST_BE}192.0.2.11 slots=8']),
    ],
)
def test_files_with_problems(file: str, problems: list[str]) -> None:
    with pytest.raises(TopologyError) as error:
        parse_hostfile((HOSTFILES / file).read_text(encoding="utf-8"), name="F")
    assert str(error.value).splitlines() == problems


@pytest.mark.parametrize(
    ("line", "host", "rule"),
    [
        ("\tw0 \t slots=4\t", HostSlots("w0", 4), None),
        ("w0 slots=4#rack", HostSlots("w0", 4), None),
        ("w0 slots=007", HostSlots("w0", 7), None),
        ("localhost slots=4", HostSlots("localhost", 4), None),
        ("w_0.Example.COM slots=1", HostSlots("w_0.Example.COM", 1), None),
        (
            "me@192.0.2.10 slots=2",
            HostSlots("me@192.0.2.10", 2),
            '--include and --exclude cannot name it, as "@" parts hosts there. Put "User me" in the ssh config.',
        ),
        (
            "fd00::1 slots=2",
            HostSlots("fd00::1", 2),
            '--include and --exclude cannot name it, as ":" parts host and slots there. Write a name.',
        ),
        (
            "fe80::1%eth0 slots=2",
            HostSlots("fe80::1%eth0", 2),
            '--include and --exclude cannot name it, as ":" parts host and slots there. Write a name.',
        ),
        ("w0 slots=4 max_slots=8", HostSlots("w0", 4), "DeepSpeed ignores Open MPI's max_slots. Remove it."),
        ("w0 slots=4 max-slots=8 # x", HostSlots("w0", 4), "DeepSpeed ignores Open MPI's max_slots. Remove it."),
    ],
)
def test_lines_that_count(line: str, host: HostSlots, rule: str | None) -> None:
    read = parse_hostfile(line, name="F")
    shown = line.partition("#")[0].strip()
    assert read.hosts == (host,)
    assert read.warnings == (() if rule is None else (f'line 1 = "{shown}" (F): {rule}',))
    assert dict(_parse_hostfile([line])) == {host.name: host.num_slots}


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("w0 slots=4x", f'DeepSpeed reads slots=4 and ignores "x". {IGNORES}'),
        ("w0 slots=2.5", f'DeepSpeed reads slots=2 and ignores ".5". {IGNORES}'),
        ("w0 slots=4 slots=8", f'DeepSpeed reads slots=4 and ignores "slots=8". {IGNORES}'),
        ("w0 slots=4 max_slots=8 x", f'DeepSpeed reads slots=4 and ignores "max_slots=8 x". {IGNORES}'),
        ("w0 max_slots=4", f"{MUST_BE}w0 slots=8"),
        ("w0 slots = 4", f"{MUST_BE}w0 slots=8"),
        ("w0 SLOTS=4", f"{MUST_BE}w0 slots=8"),
        ("w0 slots=-1", f"{MUST_BE}w0 slots=8"),
        ("w0 slots=\u0664", f"{MUST_BE}w0 slots=8"),
        ("w0:4 slots=2", f"{COLON}w0 slots=4"),
        (
            "node[01-04] slots=8",
            "a list of hosts in Slurm's syntax. Write one host a line, as given by: scontrol show hostnames "
            "'node[01-04]'",
        ),
        ("w0,w1 slots=8", "several hosts. Write one a line: NAME slots=NUMBER."),
        ("w0 slots=4, w1 slots=4", "several hosts. Write one a line: NAME slots=NUMBER."),
        ("slots=4", '"slots=4" is no name of a host. Write letters, digits, ".", "-" and "_".'),
        ("w0; slots=4", '"w0;" is no name of a host. Write letters, digits, ".", "-" and "_".'),
        ("me@ slots=4", '"me@" is no name of a host. Write letters, digits, ".", "-" and "_".'),
        ("-oProxyCommand=x@w0 slots=2", f'"-oProxyCommand=x" {NO_USER}'),
        ("a;b@w0 slots=2", f'"a;b" {NO_USER}'),
        ("a@b@w0 slots=2", f'"a@b" {NO_USER}'),
        ("@w0 slots=2", f'"" {NO_USER}'),
        ("-w0 slots=2", '"-w0" is no name of a host. Write letters, digits, ".", "-" and "_".'),
        ("fe80::1%$(x) slots=2", '"fe80::1%$(x)" is no name of a host. Write letters, digits, ".", "-" and "_".'),
        ("w0 slots=0", "a host without ranks. Give it at least one slot, or remove the line."),
    ],
)
def test_lines_that_are_refused(line: str, rule: str) -> None:
    with pytest.raises(TopologyError) as error:
        parse_hostfile(f"ok slots=1\n{line}\n", name="F")
    assert str(error.value) == Problem("line 2", rule, line).line("F")


def test_byte_order_mark_and_all_problems_at_once() -> None:
    text = "\ufeffw0 slots=2\nw1\n\n# w2 slots=2\nME@W0 slots=1\n127.0.0.1 slots=1\nlocalhost slots=1\n"
    with pytest.raises(TopologyError) as error:
        parse_hostfile(text, name="F")
    again = "Keep one line for a host, with all its slots."
    assert str(error.value).splitlines() == [
        "line 1 (F): starts with a byte-order mark, which DeepSpeed takes for a part of the name. Save the file "
        "without it.",
        f'line 2 = "w1" (F): {MUST_BE}w1 slots=8',
        f'line 5 = "ME@W0 slots=1" (F): the host of line 1 again. {again}',
        f'line 7 = "localhost slots=1" (F): the host of line 6 again. {again}',
    ]


@pytest.mark.parametrize("text", ["", "\n\n", "# worker-0 slots=2\n"])
def test_no_host(text: str) -> None:
    with pytest.raises(TopologyError) as error:
        parse_hostfile(text, name="F")
    assert str(error.value) == "F: holds no host. Write one a line, such as: worker-0 slots=8"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    with pytest.raises(TopologyError) as error:
        read_hostfile(path)
    assert str(error.value) == f"{path}: No such file or directory. Check the path."
    path.write_bytes("w0 slots=2".encode("utf-16"))
    with pytest.raises(TopologyError) as error:
        read_hostfile(path)
    assert str(error.value) == f"{path}: byte 0 is not UTF-8. Save the file as UTF-8."
