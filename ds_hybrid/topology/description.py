"""A Cluster as text: the machine description, YAML or JSON, that ``ds_hybrid.topology.source`` may name. Pure.

hosts:
  - name: node-a
    num_ranks: 4                  # ranks 0 to 3; on every host or on none, ranks: [0, 2, 4, 6] gives them by number
    numa_nodes: [0, 0, 1, 1]      # of each rank, null where unknown; may be left out
    devices: [0, 1, 2, 3]         # each rank's GPU in nvidia-smi's numbering; may be left out
    links: NV12                   # between any two ranks, or a row for each rank:
                                  # [[X, NV12, SYS, SYS], [NV12, X, SYS, SYS], ...]; may be left out
  - name: node-b
    num_ranks: 4                  # ranks 4 to 7
link_speeds:                      # may be left out, as may each number; bytes are those of one direction
  NV12: {bytes_per_second: 3.0e+11, latency_seconds: 2.0e-6}
  NET: {bytes_per_second: 2.5e+10}     # between hosts
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, Strict

from ds_hybrid.errors import TopologyError
from ds_hybrid.problems import ABSENT, Problem, did_you_mean, model_problems, read_text
from ds_hybrid.topology.cluster import Cluster, Host
from ds_hybrid.topology.links import NETWORK, PCIE_KINDS, SELF, UNKNOWN, LinkSpeed, is_link_kind

_Index = Annotated[int, Field(ge=0)]
# Not strict: YAML 1.1 takes 3e11 for a string.
_Number = Annotated[float, Strict(False), Field(gt=0)]


class _Section(BaseModel):
    """What types the values have; absent keys are looked after elsewhere."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class _Host(_Section):
    name: str
    num_ranks: Annotated[int, Field(ge=1)]
    ranks: list[_Index]
    devices: list[_Index | None]
    numa_nodes: list[_Index | None]
    links: str | list[list[str]]


class _Speed(_Section):
    bytes_per_second: _Number | None
    latency_seconds: _Number | None


class _Description(_Section):
    hosts: list[dict[str, Any]]
    link_speeds: dict[str, dict[str, Any]]


def read_cluster(path: str | Path) -> Cluster:
    """The cluster that the file at ``path`` describes.

    Raises:
        TopologyError: the file cannot be read; or one line for each problem: key, value, rule.
    """
    return parse_cluster(read_text(path, TopologyError), name=str(path))


def parse_cluster(text: str, *, name: str) -> Cluster:
    """The cluster that ``text`` describes; ``name`` is how messages call it. Errors as in :func:`read_cluster`."""
    document = _load(text, name)
    # Sizes can only be compared in a document of the right shape.
    problems = list(_shape_problems(document)) or list(_size_problems(document))
    if problems:
        raise TopologyError("\n".join(problem.line(name) for problem in problems))
    hosts = tuple(
        _host(entry, ranks) for entry, ranks in zip(document["hosts"], _ranks(document["hosts"]), strict=True)
    )
    speeds = {
        kind: LinkSpeed(**{key: None if number is None else float(number) for key, number in entry.items()})
        for kind, entry in document.get("link_speeds", {}).items()
    }
    return Cluster(hosts).with_speeds(speeds)


def cluster_to_json(cluster: Cluster) -> str:
    """The description of ``cluster``: :func:`parse_cluster` makes an equal one of it."""
    in_order = [rank for host in cluster.hosts for rank in host.ranks] == list(range(cluster.num_ranks))
    hosts: list[dict[str, Any]] = []
    for host in cluster.hosts:
        num_ranks = len(host.ranks)
        hosts.append({"name": host.name, **({"num_ranks": num_ranks} if in_order else {"ranks": host.ranks})})
        for key, values in (("devices", host.devices), ("numa_nodes", host.numa_nodes)):
            if set(values) != {None}:
                hosts[-1][key] = values
        kind = host.links[0][-1] if num_ranks > 1 else UNKNOWN
        hosts[-1]["links"] = kind if host.links == _matrix(kind, num_ranks) else host.links
    speeds = {kind: asdict(speed) for kind, speed in cluster.speeds}
    return json.dumps({"hosts": hosts, "link_speeds": speeds}, indent=2)


def _host(entry: Mapping[str, Any], ranks: Sequence[int]) -> Host:
    unknown = [None] * len(ranks)
    return Host(
        name=entry["name"],
        ranks=tuple(ranks),
        devices=tuple(entry.get("devices", unknown)),
        numa_nodes=tuple(entry.get("numa_nodes", unknown)),
        links=_matrix(entry.get("links", UNKNOWN), len(ranks)),
    )


def _ranks(hosts: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[int]]:
    num_ranks = 0
    for entry in hosts:
        ranks = entry.get("ranks", range(num_ranks, num_ranks + entry.get("num_ranks", 0)))
        num_ranks += len(ranks)
        yield ranks


def _matrix(links: str | Sequence[Sequence[str]], num_ranks: int) -> tuple[tuple[str, ...], ...]:
    if not isinstance(links, str):
        return tuple(map(tuple, links))
    places = range(num_ranks)
    return tuple(tuple(SELF if one == other else links for other in places) for one in places)


class _Loader(yaml.SafeLoader):
    """YAML in which every key is a string, as in JSON, and a key that stands twice in one mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if repeated := [key for key, count in counts.items() if count > 1]:
            raise yaml.constructor.ConstructorError(None, None, f'key "{repeated[0]}" given twice', node.start_mark)
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


def _load(text: str, name: str) -> dict[str, Any]:
    try:
        document = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise TopologyError(f"{name}: {place}{error.problem}.") from None
    except yaml.reader.ReaderError as error:
        raise TopologyError(f"{name}: character {error.position}: {error.reason}.") from None
    if not isinstance(document, dict):
        raise TopologyError(f"{name}: must hold the key hosts, not a {type(document).__name__}.")
    return document


def _shape_problems(document: dict[str, Any]) -> Iterator[Problem]:
    """Keys that are unknown or missing, and values of a wrong type."""
    broken = model_problems(_Description, document)
    yield from broken
    if broken:
        return
    hosts = document.get("hosts", [])
    if not hosts:
        yield Problem(
            "hosts", "must list the hosts, such as [{name: node-a, num_ranks: 8}].", document.get("hosts", ABSENT)
        )
    for index, entry in enumerate(hosts):
        at = f"hosts[{index}]"
        yield from model_problems(_Host, entry, at=at)
        if "name" not in entry:
            yield Problem(f"{at}.name", "missing. Give each host a name.")
        if ("ranks" in entry) == ("num_ranks" in entry) or ("ranks" in entry) != ("ranks" in hosts[0]):
            yield Problem(at, "must have num_ranks, or else ranks as every other host.")
    for kind, entry in document.get("link_speeds", {}).items():
        yield from model_problems(_Speed, entry, at=f"link_speeds.{kind}")
        if not is_link_kind(kind):
            yield Problem(f"link_speeds.{kind}", f"unknown kind of link. {_kinds_that_work(kind)}")


def _size_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that do not fit each other."""
    hosts = document["hosts"]
    names = [entry["name"] for entry in hosts]
    all_ranks = list(_ranks(hosts))
    counts = Counter(rank for ranks in all_ranks for rank in ranks)
    for index, (entry, ranks) in enumerate(zip(hosts, all_ranks, strict=True)):
        at = f"hosts[{index}]"
        first = names.index(entry["name"])
        if first < index:
            yield Problem(f"{at}.name", f"is the name of hosts[{first}] too. Give each host its own.", entry["name"])
        if not ranks or list(ranks) != sorted(ranks):
            yield Problem(f"{at}.ranks", "must be ascending, and at least one.", ranks)
        wrong = [rank for rank in ranks if counts[rank] > 1 or rank >= counts.total()]
        if wrong:
            named = ", ".join(map(str, sorted(set(wrong))))
            rule = f"each rank from 0 to {counts.total() - 1} must be on one host, once: not so {named}."
            yield Problem(f"{at}.ranks", rule, ranks)
        for key in ("devices", "numa_nodes"):
            if key in entry and len(entry[key]) != len(ranks):
                yield Problem(f"{at}.{key}", f"must have an entry for each of the {len(ranks)} ranks.", entry[key])
        yield from _link_problems(entry.get("links", UNKNOWN), len(ranks), f"{at}.links")


def _link_problems(links: str | list[list[str]], num_ranks: int, at: str) -> Iterator[Problem]:
    if isinstance(links, str):
        if not is_link_kind(links) or links == NETWORK:
            yield Problem(at, _kinds_that_work(links), links)
        return
    if [len(row) for row in links] != [num_ranks] * num_ranks:
        yield Problem(at, f"must have {num_ranks} rows of {num_ranks}, as there are {num_ranks} ranks.", links)
        return
    for one, row in enumerate(links):
        for other, kind in enumerate(row):
            place = f"{at}[{one}][{other}]"
            if one == other and kind != SELF:
                yield Problem(place, f"must be {SELF}: a rank and itself.", kind)
            elif one != other and (not is_link_kind(kind) or kind == NETWORK):
                yield Problem(place, _kinds_that_work(kind), kind)
            elif other < one and kind != links[other][one]:
                yield Problem(place, f"must equal [{other}][{one}], which is {links[other][one]}.", kind)


def _kinds_that_work(word: str) -> str:
    kinds = (*PCIE_KINDS, UNKNOWN)
    return f"Kinds: NV with a number, {', '.join(kinds)}; {NETWORK} between hosts.{did_you_mean(word, kinds)}"
