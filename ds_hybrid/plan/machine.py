"""A kind of machine: how fast it computes and what joins its ranks, each number with its source. Pure.

A table of ds_configs/machines says it: one host with as many ranks as GPUs, and as many such hosts as a run needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

from ds_hybrid.dispatch.predict import GroupSpeed
from ds_hybrid.errors import ConfigError, TopologyError
from ds_hybrid.plan.tables import read_table
from ds_hybrid.problems import Problem, model_problems
from ds_hybrid.topology.cluster import Cluster, Host
from ds_hybrid.topology.hostfile import Hostfile
from ds_hybrid.topology.links import NETWORK, SELF, LinkSpeed, is_link_kind


@dataclass(frozen=True)
class Machine:
    """One host of a kind, and the network between such hosts.

    Attributes:
        name: of the table.
        ranks_per_host: its GPUs, or the ranks that share its cores.
        link_kind: between any two of them, in nvidia-smi's words.
        memory_bytes: of one rank.
        memory_bytes_per_second: of one rank's memory, reached.
        matmul_flops: FLOP/s of one rank in plain matrix products, reached.
        expert_flops: FLOP/s of one rank in the experts' grouped products, reached.
        inside, across: links of one rank inside its host and out of it, reached; bytes of one direction.
        overlap: the part of compute beside which collectives can run.
    """

    name: str
    ranks_per_host: int
    link_kind: str
    memory_bytes: float
    memory_bytes_per_second: float
    matmul_flops: float
    expert_flops: float
    inside: GroupSpeed
    across: GroupSpeed
    overlap: float

    def cluster(self, num_ranks: int) -> Cluster:
        """As many hosts of this kind as hold ``num_ranks``; the last one may be part empty."""
        sizes = [self.ranks_per_host] * (num_ranks // self.ranks_per_host)
        if num_ranks % self.ranks_per_host:
            sizes.append(num_ranks % self.ranks_per_host)
        return self._cluster([(f"host-{index}", size) for index, size in enumerate(sizes)])

    def cluster_of(self, hostfile: Hostfile) -> Cluster:
        """The hosts of a hostfile, each of this kind.

        Raises:
            TopologyError: a host has more slots than this kind of machine has.
        """
        for host in hostfile.hosts:
            if host.num_slots > self.ranks_per_host:
                raise TopologyError(
                    f"{host.name} slots={host.num_slots}: {self.name} has {self.ranks_per_host} ranks a host. "
                    "Name a table of the machines you have."
                )
        return self._cluster([(host.name, host.num_slots) for host in hostfile.hosts])

    def all_to_all(self, ranks: Sequence[int], cluster: Cluster) -> GroupSpeed:
        """What a rank of a group reaches when it sends as much to every other: it is held up by its slower link.

        Ranks send to their host and out of it at the same time. This is what ``ds_hybrid.dispatch.measure`` would
        measure for the group.
        """
        share_across = self._share_across(ranks, cluster)
        if share_across == 0:
            return self.inside
        bandwidth = min(
            self.across.bandwidth / share_across,
            self.inside.bandwidth / (1 - share_across) if share_across < 1 else float("inf"),
        )
        return GroupSpeed(self.across.latency, bandwidth)

    def ring(self, ranks: Sequence[int], cluster: Cluster) -> GroupSpeed:
        """What a rank of a group reaches in an all-gather, reduce-scatter or all-reduce by rings over all its links.

        A ring leaves a host once, and there are as many rings as the host has ranks in the group, so what leaves the
        host goes over the links of all of them.
        """
        shares = _ranks_by_host(ranks, cluster)
        if len(shares) == 1:
            return self.inside
        return GroupSpeed(self.across.latency, min(self.inside.bandwidth, min(shares) * self.across.bandwidth))

    def _share_across(self, ranks: Sequence[int], cluster: Cluster) -> float:
        """The largest part of what a rank sends that leaves its host."""
        if len(ranks) == 1:
            return 0.0
        return (len(ranks) - min(_ranks_by_host(ranks, cluster))) / (len(ranks) - 1)

    def _cluster(self, hosts: Sequence[tuple[str, int]]) -> Cluster:
        built, first = [], 0
        for name, size in hosts:
            links = tuple(
                tuple(SELF if one == other else self.link_kind for other in range(size)) for one in range(size)
            )
            ranks = tuple(range(first, first + size))
            built.append(Host(name, ranks, (None,) * size, (None,) * size, links))
            first += size
        speeds = {
            self.link_kind: LinkSpeed(self.inside.bandwidth, self.inside.latency),
            NETWORK: LinkSpeed(self.across.bandwidth, self.across.latency),
        }
        return Cluster(tuple(built)).with_speeds(speeds)


def _ranks_by_host(ranks: Sequence[int], cluster: Cluster) -> list[int]:
    """How many of ``ranks`` each host has, hosts with none left out."""
    return list(Counter(cluster.host_of_rank[rank] for rank in ranks).values())


def _no_switch(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


_NUMBER = (Strict(False), BeforeValidator(_no_switch))
"""YAML reads 3e14, without a point, as text."""


class _Number(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    value: Annotated[float, *_NUMBER, Field(gt=0, allow_inf_nan=False)]
    source: Annotated[str, Field(min_length=1)]


class _Part(_Number):
    value: Annotated[float, *_NUMBER, Field(gt=0, le=1)]


class _Share(_Number):
    value: Annotated[float, *_NUMBER, Field(ge=0, le=1)]


class MachineTable(BaseModel):
    """What a table of ds_configs/machines must say. Peaks are as sold; efficiencies say what of them is reached."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    ranks_per_host: Annotated[int, Field(ge=1)]
    link_kind: str
    memory_bytes: _Number
    memory_bytes_per_second: _Number
    matmul_flops: _Number
    inside_bytes_per_second: _Number
    inside_latency_seconds: _Number
    across_bytes_per_second: _Number
    across_latency_seconds: _Number
    matmul_efficiency: _Part
    expert_efficiency: _Part
    memory_efficiency: _Part
    link_efficiency: _Part
    overlap: _Share
    usable_memory: _Part


def read_machine(name: str) -> Machine:
    """The machine of a table: its name, or the path of a file of the same form.

    Raises:
        ConfigError: there is no such table; or one line for each key that is missing, unknown or wrong.
    """
    document, file = read_table("machines", name)
    problems = [
        Problem(key, "missing. Copy the key from another table of ds_configs/machines.")
        for key in MachineTable.model_fields
        if key not in document
    ] + model_problems(MachineTable, document)
    kind = document.get("link_kind")
    if isinstance(kind, str) and (not is_link_kind(kind) or kind == NETWORK):
        problems.append(Problem("link_kind", "must be a word of nvidia-smi topo -m, or HOST when unknown.", kind))
    problems += _missing_parts(document)
    if problems:
        raise ConfigError(*(problem.line(file) for problem in problems))
    table = MachineTable.model_validate(document)
    reached = table.link_efficiency.value
    return Machine(
        name=name,
        ranks_per_host=table.ranks_per_host,
        link_kind=table.link_kind,
        memory_bytes=table.memory_bytes.value * table.usable_memory.value,
        memory_bytes_per_second=table.memory_bytes_per_second.value * table.memory_efficiency.value,
        matmul_flops=table.matmul_flops.value * table.matmul_efficiency.value,
        expert_flops=table.matmul_flops.value * table.expert_efficiency.value,
        inside=GroupSpeed(table.inside_latency_seconds.value, table.inside_bytes_per_second.value * reached),
        across=GroupSpeed(table.across_latency_seconds.value, table.across_bytes_per_second.value * reached),
        overlap=table.overlap.value,
    )


def _missing_parts(document: dict[str, object]) -> list[Problem]:
    """Numbers without their value or their source."""
    return [
        Problem(f"{key}.{part}", "missing. Write {value: NUMBER, source: TEXT}.")
        for key, number in document.items()
        if isinstance(number, dict)
        for part in ("value", "source")
        if part not in number
    ]
