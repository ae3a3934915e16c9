"""Cluster: where each rank runs and what joins it to the others. Everything above reads this value. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from ds_hybrid.errors import TopologyError
from ds_hybrid.topology.islands import find_islands
from ds_hybrid.topology.links import NETWORK, SELF, UNKNOWN, LinkSpeed, is_link_kind, num_nvlinks, slowness


@dataclass(frozen=True)
class RankReport:
    """What one rank knows of its place. The reports of all ranks make a Cluster.

    Attributes:
        host_key: equal for the ranks of one host, and different between hosts, also where those share a name.
        host_name: what people call the host.
        device: index of its GPU in nvidia-smi's numbering (not CUDA's, which may hide GPUs); None without a GPU.
        numa_node: the NUMA node next to its GPU, or next to its CPUs; None when unknown.
        links: the kind of link from its GPU to GPU 0, 1, ... of the host, as in ``LinkTable.links_of``; None when
            unknown.
    """

    host_key: str
    host_name: str
    device: int | None = None
    numa_node: int | None = None
    links: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Host:
    """A host and the n ranks on it.

    Attributes:
        name: differs between the hosts of a cluster.
        ranks: [n], ascending.
        devices: [n], the index of each rank's GPU on the host; None when it has none or it is unknown.
        numa_nodes: [n]; None when unknown.
        links: [n, n] kinds of link between its ranks, symmetric: nvidia-smi's words, "HOST" when unknown.
    """

    name: str
    ranks: tuple[int, ...]
    devices: tuple[int | None, ...]
    numa_nodes: tuple[int | None, ...]
    links: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        places = range(len(self.ranks))
        assert list(self.ranks) == sorted(set(self.ranks)), self.ranks
        assert len(self.devices) == len(self.numa_nodes) == len(self.links) == len(self.ranks), self
        for one in places:
            for other in places:
                kind = self.links[one][other]
                assert kind == self.links[other][one], (one, other, kind)
                assert kind == SELF if one == other else is_link_kind(kind), (one, other, kind)


@dataclass(frozen=True)
class Island:
    """Ranks of one host that are joined pairwise by its fastest links.

    Attributes:
        ranks: ascending.
        joined_by: "NVLink", PIX, PXB, PHB or NODE; "NUMA" when only the NUMA node is known to join them; "host" when
            nothing is known that would part the host.
    """

    ranks: tuple[int, ...]
    joined_by: str


@dataclass(frozen=True)
class Cluster:
    """The hosts that the ranks run on. Hashable, and equal on all ranks that make it from the same reports.

    Attributes:
        hosts: in the order of their first ranks; each of the ranks 0 to num_ranks - 1 is on one of them.
        speeds: pairs (kind of link, its speed), sorted; kinds that are not there are unknown.
    """

    hosts: tuple[Host, ...]
    speeds: tuple[tuple[str, LinkSpeed], ...] = ()

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host.ranks)
        assert ranks == list(range(len(ranks))), ranks
        assert len({host.name for host in self.hosts}) == len(self.hosts), self.hosts
        object.__setattr__(self, "hosts", tuple(sorted(self.hosts, key=lambda host: host.ranks)))
        object.__setattr__(self, "speeds", tuple(sorted(self.speeds, key=lambda speed: slowness(speed[0]))))

    @classmethod
    def from_reports(cls, reports: Sequence[RankReport]) -> Cluster:
        """The cluster that the ranks see together; ``reports[r]`` is rank r's.

        Hosts that share a name get a number: node, node#2. Where two ranks disagree on the link between them, the
        slower kind counts, so that no one relies on the faster.

        Raises:
            TopologyError: a rank reports a link that is none.
        """
        for rank, report in enumerate(reports):
            for word in report.links or ():
                if word != SELF and not is_link_kind(word):
                    raise TopologyError(
                        f'rank {rank} on host {report.host_name} reports a link "{word}", must be a word of '
                        f"nvidia-smi topo -m. Describe the machine in a file that ds_hybrid.topology.source names."
                    )
        ranks_of_key: dict[str, list[int]] = {}
        for rank, report in enumerate(reports):
            ranks_of_key.setdefault(report.host_key, []).append(rank)
        names = _told_apart(reports[ranks[0]].host_name for ranks in ranks_of_key.values())
        return cls(
            tuple(
                Host(
                    name=name,
                    ranks=tuple(ranks),
                    devices=tuple(reports[rank].device for rank in ranks),
                    numa_nodes=tuple(reports[rank].numa_node for rank in ranks),
                    links=tuple(
                        tuple(SELF if one == other else _link(reports[one], reports[other]) for other in ranks)
                        for one in ranks
                    ),
                )
                for name, ranks in zip(names, ranks_of_key.values(), strict=True)
            )
        )

    def with_speeds(self, speeds: Mapping[str, LinkSpeed]) -> Cluster:
        """The same cluster with these speeds of links in place of its own for the same kinds."""
        return replace(self, speeds=tuple({**dict(self.speeds), **speeds}.items()))

    @cached_property
    def num_ranks(self) -> int:
        return sum(len(host.ranks) for host in self.hosts)

    @cached_property
    def host_of_rank(self) -> tuple[int, ...]:
        """[num_ranks]: the index of each rank's host in ``hosts``."""
        return tuple(host for _, (host, _) in sorted(self._places.items()))

    @cached_property
    def numa_node_of_rank(self) -> tuple[int | None, ...]:
        """[num_ranks]: None where unknown. Numbers are those of the rank's host."""
        return tuple(self.hosts[host].numa_nodes[place] for _, (host, place) in sorted(self._places.items()))

    @cached_property
    def islands(self) -> tuple[Island, ...]:
        """The islands of all hosts; each rank is in one."""
        islands = []
        islands_of = cache(find_islands)  # most hosts are alike
        for host in self.hosts:
            joined_by, members = islands_of(host.links, host.numa_nodes)
            islands += [Island(tuple(host.ranks[place] for place in island), joined_by) for island in members]
        return tuple(sorted(islands, key=lambda island: island.ranks))

    @cached_property
    def island_of_rank(self) -> tuple[int, ...]:
        """[num_ranks]: the index of each rank's island in ``islands``."""
        found = {rank: index for index, island in enumerate(self.islands) for rank in island.ranks}
        return tuple(found[rank] for rank in range(self.num_ranks))

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Machines that look broken, one line each: GPUs that have lost NVLink, GPUs that two ranks share."""
        return tuple(warning for host in self.hosts for warning in (*_lost_nvlinks(host), *_shared_devices(host)))

    def link(self, rank: int, other: int) -> str:
        """The kind of link between two ranks: a word of nvidia-smi, "HOST" (one host, unknown) or "NET" (two hosts)."""
        (host, place), (other_host, other_place) = self._places[rank], self._places[other]
        return self.hosts[host].links[place][other_place] if host == other_host else NETWORK

    def speed(self, kind: str) -> LinkSpeed:
        """What is known of a kind of link."""
        return dict(self.speeds).get(kind, LinkSpeed())

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """Rank -> its host, and its place among the host's ranks."""
        return {rank: (index, place) for index, host in enumerate(self.hosts) for place, rank in enumerate(host.ranks)}


def _told_apart(names: Iterable[str]) -> list[str]:
    seen = Counter[str]()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return unique


def _link(one: RankReport, other: RankReport) -> str:
    kinds = [
        mine.links[theirs.device]
        for mine, theirs in ((one, other), (other, one))
        if mine.links is not None and theirs.device is not None and theirs.device < len(mine.links)
    ]
    # Two ranks on one GPU see it as X; what joins them is not a link.
    return max(kinds, key=slowness, default=UNKNOWN) if SELF not in kinds else UNKNOWN


def _lost_nvlinks(host: Host) -> Iterable[str]:
    joined = [place for place, row in enumerate(host.links) if any(map(num_nvlinks, row))]
    if joined:
        for place in range(len(host.ranks)):
            if place not in joined:
                yield (
                    f"rank {host.ranks[place]} ({_device(host, place)} of host {host.name}): no NVLink to any rank, "
                    f"while {len(joined)} ranks of the host have some. It stands apart. Check: nvidia-smi nvlink -s"
                )


def _shared_devices(host: Host) -> Iterable[str]:
    for device, count in Counter(host.devices).items():
        if device is not None and count > 1:
            ranks = ", ".join(str(rank) for rank, own in zip(host.ranks, host.devices, strict=True) if own == device)
            yield (
                f"ranks {ranks}: all on GPU {device} of host {host.name}. Give each its own, unless they are parts of "
                "it (MIG)."
            )


def _device(host: Host, place: int) -> str:
    return "no GPU" if host.devices[place] is None else f"GPU {host.devices[place]}"
