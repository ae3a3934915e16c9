"""Four real ranks find out where they run: equal on all, hosts told apart, files read once, errors raised alike."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from ds_hybrid.errors import TopologyError
from ds_hybrid.topology import probe
from ds_hybrid.topology.cluster import Cluster, Host, Island
from ds_hybrid.topology.description import cluster_to_json
from ds_hybrid.topology.probe import Probe, probe_cluster
from tests.ranks import RankPool
from tests.topology.machines import DATA, link_table, real_cluster
from tests.topology.stand_ins import address_of, put_on_gpu, without_nvml, write_nvidia_smi, write_sysfs

_NAME = socket.gethostname()
_NO_GPU = ("none (the accelerator is cpu)",) * 4


def _host(name: str, ranks: tuple[int, ...], numa_nodes: tuple[int, ...]) -> Host:
    links = tuple(tuple("X" if one == other else "HOST" for other in ranks) for one in ranks)
    return Host(name, ranks, (None,) * len(ranks), numa_nodes, links)


def test_one_host(four_ranks: RankPool, tmp_path: Path) -> None:
    sysfs = write_sysfs(tmp_path, cpus_of_node={0: "", 3: "0-4095"})
    expected = Probe(Cluster((_host(_NAME, (0, 1, 2, 3), (3, 3, 3, 3)),)), _NO_GPU)
    assert four_ranks.run(probed, "auto", sysfs) == [expected] * 4
    assert expected.cluster.islands == (Island((0, 1, 2, 3), "host"),)


def test_two_hosts_of_one_name(four_ranks: RankPool, tmp_path: Path) -> None:
    """Ranks 0 and 2 are on one, 1 and 3 on the other, and each rank has CPUs of a node of its own."""
    sysfs = [write_sysfs(tmp_path / f"{rank}", cpus_of_node={10 + rank: "0-4095"}) for rank in range(4)]
    hosts = (_host(_NAME, (0, 2), (10, 12)), _host(f"{_NAME}#2", (1, 3), (11, 13)))
    assert four_ranks.run(probed_on_two_hosts, sysfs) == [Probe(Cluster(hosts), _NO_GPU)] * 4


def test_gpus_that_alternate_between_islands(four_ranks: RankPool, tmp_path: Path) -> None:
    """Ranks on GPUs 2, 0, 3, 1 of a machine whose NVLinks join GPUs 0 and 1, and 2 and 3."""
    machine = "a100_pcie_nvlink_bridge_pairs"
    topo = (DATA / "topo" / f"{machine}.txt").read_text(encoding="utf-8")
    write_nvidia_smi(tmp_path / "bin", topo, {gpu: address_of(gpu) for gpu in range(4)})
    found = four_ranks.run(probed_on_gpus, (2, 0, 3, 1), tmp_path)
    table = link_table(machine)
    links = tuple(tuple(table.cells[one][other] for other in (2, 0, 3, 1)) for one in (2, 0, 3, 1))
    expected = Cluster((Host(_NAME, (0, 1, 2, 3), (2, 0, 3, 1), (2, 0, 3, 1), links),))
    assert found == [Probe(expected, ("nvidia-smi (NVML: nvidia-ml-py is not installed)",) * 4)] * 4
    assert found[0].cluster.islands == (Island((0, 2), "NVLink"), Island((1, 3), "NVLink"))


def test_a_file_that_rank_0_alone_can_read(four_ranks: RankPool, tmp_path: Path) -> None:
    cluster = real_cluster("h100_4gpu_nv6_interleaved_cpus")
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "cluster.json").write_text(cluster_to_json(cluster))
    found = four_ranks.run(probed_in_own_folder, tmp_path, "cluster.json")
    assert found == [Probe(cluster, ("cluster.json",) * 4)] * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cluster.yaml: No such file or directory. Check the path."),
        ("hosts: [{num_ranks: 4}]", "hosts[0].name (cluster.yaml): missing. Give each host a name."),
        (
            "hosts: [{name: a, num_ranks: 4}, {name: b, num_ranks: 4}]",
            "hosts (cluster.yaml): describe 8 ranks, must describe the 4 that run.",
        ),
    ],
)
def test_every_rank_says_what_is_wrong_with_a_file(
    text: str | None, message: str, four_ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "rank0").mkdir()
    if text is not None:
        (tmp_path / "rank0" / "cluster.yaml").write_text(text)
    assert four_ranks.run(error_in_own_folder, tmp_path, "cluster.yaml") == [message] * 4


def probed(source: str, sysfs: Path) -> Probe:
    return probe_cluster(source, sysfs=sysfs)


def probed_on_two_hosts(sysfs: list[Path]) -> Probe:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "key_of_this_host", lambda: f"host {dist.get_rank() % 2}")
        return probe_cluster(sysfs=sysfs[dist.get_rank()])


def probed_on_gpus(gpu_of_rank: tuple[int, ...], folder: Path) -> Probe:
    with pytest.MonkeyPatch.context() as patch:
        without_nvml(patch)
        patch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, gpu_of_rank)))
        put_on_gpu(patch, dist.get_rank(), in_cuda_order=[address_of(gpu) for gpu in range(4)])
        return probe_cluster(sysfs=folder)


def probed_in_own_folder(folder: Path, source: str) -> Probe:
    own = folder / f"rank{dist.get_rank()}"
    own.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(own)
        return probe_cluster(source)


def error_in_own_folder(folder: Path, source: str) -> str:
    with pytest.raises(TopologyError) as error:
        probed_in_own_folder(folder, source)
    return str(error.value)
