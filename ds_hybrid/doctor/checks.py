"""What the facts of the hosts say about a run. Pure.

``facts`` are those of each host that answered, by its name in the hostfile; without one, of this host alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from ipaddress import ip_address
from typing import TypeVar

from ds_hybrid.doctor.facts import HostFacts, NoFacts
from ds_hybrid.doctor.findings import Finding, Severity
from ds_hybrid.engine.versions import TESTED
from ds_hybrid.problems import Problem

Facts = Mapping[str, HostFacts]
_Value = TypeVar("_Value", bound=Hashable)


def check_facts(facts: Facts, *, num_hosts: int) -> Iterator[Finding]:
    """All checks that need nothing else than, of the run, the number of its hosts."""
    yield from _loads(facts)
    yield from _sameness(facts)
    yield from _tested_versions(facts)
    yield from _tools(facts)
    yield from _devices(facts)
    if num_hosts > 1:
        yield from _own_names(facts)
    yield from _machines(facts)
    yield from _locks(facts)


def check_silence(silent: Mapping[str, NoFacts], *, login: str, python: str) -> Iterator[Finding]:
    """The hosts that told nothing; ``login`` is the ssh command without the host, ``python`` what was to run there."""
    for name, answer in silent.items():
        if answer.is_reachable:
            rule = (
                f"{python} -m ds_hybrid.doctor.collect failed there: {answer.reason}. Every host must have the same "
                "environment and the current folder, at the same paths."
            )
        else:
            rule = f"not reachable: {answer.reason}. This must work without a question: {login} {name} true"
        yield Finding("error", "reachable", Problem(name, rule).line("host"))


def check_ranks(facts: Facts, *, slots: Mapping[str, int], num_gpus: int | None) -> Iterator[Finding]:
    """The ranks that a run would start on each host against the devices there.

    Args:
        slots: ranks of each host that the hostfile gives; empty without one.
        num_gpus: what --num_gpus gives instead.
    """
    for name, num_slots in slots.items():
        if num_gpus is not None and num_gpus > num_slots:
            rule = (
                f"the hostfile says slots={num_slots}, and DeepSpeed starts {num_gpus} ranks all the same. "
                f"Give {num_slots} at most, or raise the slots."
            )
            yield Finding("warning", "slots", Problem("--num_gpus", rule, num_gpus).line(name))
    for name, host in facts.items():
        num_ranks = num_gpus if num_gpus is not None else slots.get(name, 0)
        if host.devices and num_ranks > len(host.devices):
            place = "--num_gpus" if num_gpus is not None else "slots"
            rule = f"a rank needs a device, and the host has {len(host.devices)}. Give {len(host.devices)} at most."
            yield Finding("error", "slots", Problem(place, rule, num_ranks).line(name))


def _loads(facts: Facts) -> Iterator[Finding]:
    for name, host in facts.items():
        if host.failure is not None:
            rule = f"do not load: {host.failure}. Set the environment up again: launch/setup.sh"
            yield Finding("error", "loads", Problem("torch and deepspeed", rule).line(name))


_COMPARED: tuple[tuple[str, Severity, Callable[[HostFacts], str | None]], ...] = (
    ("python", "error", lambda host: host.python),
    ("torch", "error", lambda host: host.packages["torch"]),
    ("deepspeed", "error", lambda host: host.packages["deepspeed"]),
    ("ds_hybrid", "error", lambda host: f"{host.packages['ds_hybrid'] or 'copy'} (files {host.source_digest})"),
    ("transformers", "warning", lambda host: host.packages["transformers"]),
    ("accelerate", "warning", lambda host: host.packages["accelerate"]),
    ("peft", "warning", lambda host: host.packages["peft"]),
    ("ninja", "warning", lambda host: host.ninja),
    ("accelerator", "error", lambda host: host.accelerator),
)


def _sameness(facts: Facts) -> Iterator[Finding]:
    for what, severity, value_of in _COMPARED:
        hosts_of = _hosts_of({name: value_of(host) for name, host in facts.items()})
        if len(hosts_of) > 1:
            found = "; ".join(f"{value or 'none'} on {', '.join(hosts)}" for value, hosts in hosts_of.items())
            yield Finding(severity, "same", f"{what}: {found}. Must be the same on all hosts.")


def _tested_versions(facts: Facts) -> Iterator[Finding]:
    for package, tested in TESTED.items():
        for found, hosts in _hosts_of({name: host.packages[package] for name, host in facts.items()}).items():
            if found is not None and found.partition("+")[0] not in tested:
                rule = f"untested. Tested: {', '.join(tested)}."
                yield Finding("warning", "tested", Problem(package, rule, found).line(", ".join(hosts)))


def _tools(facts: Facts) -> Iterator[Finding]:
    tools: Mapping[str, Callable[[HostFacts], str | None]] = {
        "ninja": lambda host: host.ninja,
        "C++ compiler": lambda host: host.compiler,
    }
    for tool, value_of in tools.items():
        missing = {name: host.accelerator == "cpu" for name, host in facts.items() if value_of(host) is None}
        for is_on_cpu, hosts in _hosts_of(missing).items():
            op = "deepspeed_shm_comm, without which no run starts" if is_on_cpu else "ops such as fused_adam"
            rule = f"none on PATH, and DeepSpeed compiles {op}. Install it; on other hosts, .deepspeed_env sets PATH."
            yield Finding("error" if is_on_cpu else "warning", "tools", Problem(tool, rule).line(", ".join(hosts)))


def _devices(facts: Facts) -> Iterator[Finding]:
    for name, host in facts.items():
        if host.accelerator not in (None, "cpu") and not host.devices:
            rule = "DeepSpeed takes it and finds no device of it. Check the driver, or set DS_ACCELERATOR=cpu."
            yield Finding("error", "devices", Problem("accelerator", rule, host.accelerator).line(name))


def _own_names(facts: Facts) -> Iterator[Finding]:
    for name, host in facts.items():
        first = host.addresses[0].partition("%")[0] if host.addresses else None
        if host.gloo_interface is not None or (first is not None and not ip_address(first).is_loopback):
            continue
        means = f"means {first} there" if first else "means nothing there"
        rule = (
            f"{means}, so gloo listens where no other host reaches it, and the run hangs. Give the name its network "
            "address in /etc/hosts, or set GLOO_SOCKET_IFNAME in .deepspeed_env."
        )
        severity: Severity = "error" if host.backend == "gloo" else "warning"
        yield Finding(severity, "own_name", Problem("host name", rule, host.host_name).line(name))


def _machines(facts: Facts) -> Iterator[Finding]:
    for names in _hosts_of({name: host.host_key for name, host in facts.items()}).values():
        if len(names) > 1:
            rule = "are one machine, and its ranks would share devices. Keep one line for it in the hostfile."
            yield Finding("warning", "machines", f"{', '.join(names)}: {rule}")


def _locks(facts: Facts) -> Iterator[Finding]:
    hosts_of: dict[tuple[str, str], list[str]] = {}
    held = set()
    for name, host in facts.items():
        for lock in host.locks:
            hosts_of.setdefault((lock.path, lock.identity), []).append(name)
            # On a shared file system its maker may be on any of the hosts.
            if lock.is_held:
                held.add((lock.path, lock.identity))
    for file, names in hosts_of.items():
        if file not in held:
            rule = (
                "no process there holds it, so one that was killed has left it, and whoever needs the extension waits "
                "without end. Remove it."
            )
            yield Finding("error", "lock", Problem(file[0], rule).line(", ".join(names)))


def _hosts_of(values: Mapping[str, _Value]) -> dict[_Value, list[str]]:
    """The names of the hosts that have each value, in the order of the hosts."""
    found: dict[_Value, list[str]] = {}
    for name, value in values.items():
        found.setdefault(value, []).append(name)
    return found
