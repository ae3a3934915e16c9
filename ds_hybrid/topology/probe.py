"""The running ranks -> Cluster. The one file of this room that imports torch and deepspeed."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_hybrid.errors import TopologyError
from ds_hybrid.topology.cluster import Cluster, RankReport
from ds_hybrid.topology.description import read_cluster
from ds_hybrid.topology.gpus import read_gpus
from ds_hybrid.topology.this_host import (
    SYSFS,
    PciAddress,
    key_of_this_host,
    numa_node_of_device,
    numa_node_of_this_process,
)


@dataclass(frozen=True)
class Probe:
    """What the ranks found out together. Equal on all of them.

    Attributes:
        cluster: of all ranks of the run.
        sources: who told the links of each rank, as in ``HostGpus.source``, [num_ranks]; or the file that described
            them all.
    """

    cluster: Cluster
    sources: tuple[str, ...]


def probe_cluster(source: str = "auto", *, sysfs: Path = SYSFS) -> Probe:
    """What the running ranks see together, or what a file says of them. Collective over all ranks.

    The current device must be this rank's own.

    Args:
        source: ds_hybrid.topology.source, the same on all ranks: "auto", or the path of a machine description, which
            rank 0 reads.
        sysfs: where the kernel shows its devices.

    Raises:
        TopologyError: on every rank, what is wrong with the file.
    """
    if source != "auto":
        return Probe(_read_on_rank_0(source), (source,) * dist.get_world_size())
    found: list[tuple[RankReport, str]] = _gather(report_of_this_rank(sysfs=sysfs))
    return Probe(Cluster.from_reports([report for report, _ in found]), tuple(told for _, told in found))


def report_of_this_rank(*, sysfs: Path = SYSFS) -> tuple[RankReport, str]:
    """What this rank knows of its place, and who told its links. Not collective."""
    report = RankReport(key_of_this_host(), socket.gethostname(), numa_node=numa_node_of_this_process(sysfs=sysfs))
    address = _address_of_gpu()
    if address is None:
        return report, f"none (the accelerator is {get_accelerator().device_name()})"
    gpus = read_gpus(sysfs=sysfs)
    if address in gpus.addresses:
        device = gpus.addresses.index(address)
        report = replace(report, device=device, links=gpus.links[device])
        node, source = gpus.numa_nodes[device], gpus.source
    else:
        node = numa_node_of_device(address, sysfs=sysfs)
        source = f"none ({gpus.source} does not list this rank's GPU)" if gpus.addresses else gpus.source
    # The CPUs may have been bound to fit the GPU, so they are the next best to ask.
    return (report if node is None else replace(report, numa_node=node)), source


def _address_of_gpu() -> PciAddress | None:
    """The PCI address of the current device, the one name of a GPU that CUDA_VISIBLE_DEVICES does not change."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cuda" or not accelerator.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(accelerator.current_device())
    return properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id


def _read_on_rank_0(path: str) -> Cluster:
    mine: Cluster | TopologyError | None = None
    if dist.get_rank() == 0:
        try:
            mine = read_cluster(path)
        except TopologyError as error:
            mine = error
    cluster = _gather(mine)[0]
    if isinstance(cluster, TopologyError):
        raise cluster
    num_ranks = dist.get_world_size()
    if cluster.num_ranks != num_ranks:
        raise TopologyError(
            f"hosts ({path}): describe {cluster.num_ranks} ranks, must describe the {num_ranks} that run."
        )
    return cluster


def _gather(mine: Any) -> list[Any]:
    """What each rank has, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
