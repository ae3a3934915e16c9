"""DeepSpeed's hostfile, checked: what ``deepspeed --hostfile`` reads, one ``NAME slots=NUMBER`` a line. Pure.

DeepSpeed 0.19.8 searches each line for ``NAME slots=NUMBER`` and lets pass what follows, hosts without slots and names
that are no names. Here each of these is an error or, where the meaning is clear, a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from ds_hybrid.errors import TopologyError
from ds_hybrid.problems import Problem, read_text

_ENTRY = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>[0-9]+)\s*(?P<rest>.*)", re.ASCII)
_MAX_SLOTS = re.compile(r"max[_-]slots=[0-9]+", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?", re.ASCII)
# A first "-" would make it an option of ssh, and what has none of these signs needs no quotes in any shell.
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
_COUNT_AFTER_COLON = re.compile(r"(?P<host>[A-Za-z0-9._-]+):(?P<count>[0-9]+)", re.ASCII)
_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class HostSlots:
    """A host, by the name that the launcher reaches it by, and the number of ranks to start on it."""

    name: str
    num_slots: int


@dataclass(frozen=True)
class Hostfile:
    """The hosts in the order of their ranks, and what is odd about the file, one line each."""

    hosts: tuple[HostSlots, ...]
    warnings: tuple[str, ...]


def read_hostfile(path: str | Path) -> Hostfile:
    """The hostfile at ``path``.

    Raises:
        TopologyError: with one line for each problem of the file.
    """
    return parse_hostfile(read_text(path, TopologyError), name=str(path))


def parse_hostfile(text: str, *, name: str) -> Hostfile:
    """The hostfile in ``text``; ``name`` is how messages call it. Errors as in :func:`read_hostfile`."""
    problems: list[Problem] = []
    warnings: list[Problem] = []
    hosts: dict[str, tuple[int, HostSlots]] = {}
    if text.startswith(_BYTE_ORDER_MARK):
        rule = "starts with a byte-order mark, which DeepSpeed takes for a part of the name. Save the file without it."
        problems.append(Problem("line 1", rule))
    for number, line in enumerate(text.removeprefix(_BYTE_ORDER_MARK).splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        place, parsed = f"line {number}", _parse(entry)
        if isinstance(parsed, str):
            problems.append(Problem(place, parsed, entry))
            continue
        warnings.extend(Problem(place, rule, entry) for rule in _oddities(entry, parsed.name))
        first, _ = hosts.setdefault(_identity(parsed.name), (number, parsed))
        if first != number:
            rule = f"the host of line {first} again. Keep one line for a host, with all its slots."
            problems.append(Problem(place, rule, entry))
    if problems:
        raise TopologyError("\n".join(problem.line(name) for problem in problems))
    if not hosts:
        raise TopologyError(f"{name}: holds no host. Write one a line, such as: worker-0 slots=8")
    if len(hosts) > 1 and "localhost" in hosts:
        number, host = hosts["localhost"]
        rule = "is another machine on each host. Write the name by which the others reach it."
        warnings.append(Problem(f"line {number}", rule, host.name))
    return Hostfile(tuple(host for _, host in hosts.values()), tuple(warning.line(name) for warning in warnings))


def _parse(entry: str) -> HostSlots | str:
    """The host of a line without its comment, or the rule that the line breaks."""
    match = _ENTRY.fullmatch(entry)
    host = match["host"] if match else entry.split()[0]
    user, at, address = host.rpartition("@")
    if count := _COUNT_AFTER_COLON.fullmatch(address):
        written = f"{count['host']} slots={count['count']}"
        return f"must be NAME slots=NUMBER; the colon is Horovod's and MPICH's. Write: {written}"
    if "[" in address:
        return (
            f"a list of hosts in Slurm's syntax. Write one host a line, as given by: scontrol show hostnames '{host}'"
        )
    if "," in entry:
        return "several hosts. Write one a line: NAME slots=NUMBER."
    if not _NAME.fullmatch(address) and not _is_ipv6(address):
        return f'"{host}" is no name of a host. Write letters, digits, ".", "-" and "_".'
    if at and not _USER.fullmatch(user):
        return f'"{user}" is no name of a user. Write letters, digits, ".", "-" and "_", or put it in the ssh config.'
    if match is None:
        return f'must be NAME slots=NUMBER, a whole number and no blanks around "=". Write, say: {host} slots=8'
    if match["rest"] and not _MAX_SLOTS.fullmatch(match["rest"]):
        return f'DeepSpeed reads slots={match["slots"]} and ignores "{match["rest"]}". Write NAME slots=NUMBER alone.'
    if int(match["slots"]) == 0:
        return "a host without ranks. Give it at least one slot, or remove the line."
    return HostSlots(host, int(match["slots"]))


def _oddities(entry: str, host: str) -> Iterator[str]:
    user, at, address = host.rpartition("@")
    if at:
        yield f'--include and --exclude cannot name it, as "@" parts hosts there. Put "User {user}" in the ssh config.'
    if _is_ipv6(address):
        yield '--include and --exclude cannot name it, as ":" parts host and slots there. Write a name.'
    if _MAX_SLOTS.search(entry):
        yield "DeepSpeed ignores Open MPI's max_slots. Remove it."


def _identity(host: str) -> str:
    """One text for the names of one host: without user, in small letters, one word for all loopback addresses."""
    address = host.rpartition("@")[2].lower()
    try:
        return "localhost" if ip_address(address).is_loopback else address
    except ValueError:
        return address


def _is_ipv6(address: str) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    # ip_address takes any text for the zone, as in fe80::1%eth0.
    return isinstance(parsed, IPv6Address) and (parsed.scope_id is None or bool(_USER.fullmatch(parsed.scope_id)))
