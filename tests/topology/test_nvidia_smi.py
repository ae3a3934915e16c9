"""Twelve machines parse to what INDEX.md says of them; the oddities of other texts; what cannot be read is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds_hybrid.errors import TopologyError
from ds_hybrid.topology.nvidia_smi import LinkTable, parse_topo
from tests.topology.machines import DATA, link_table

MACHINES = sorted(path.stem for path in (DATA / "topo").glob("*.txt"))

HEADER = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
TWO_GPUS = (
    HEADER + "GPU0\t X \tNV4\tPIX\t0-7\t0\t\tN/A\nGPU1\tNV4\t X \tSYS\t8-15\t1\t\tN/A\nNIC0\tPIX\tSYS\t X \t\t\t\t\n"
)


def as_json(table: LinkTable) -> dict[str, Any]:
    """A table in the keys of the expected files."""
    names = (*table.gpus, *table.nics)
    affinity = table.numa_affinity
    return {
        "gpus": list(table.gpus),
        "nics": list(table.nics),
        "matrix": {name: dict(zip(names, row, strict=True)) for name, row in zip(names, table.cells, strict=True)},
        "numa_affinity": None if affinity is None else dict(zip(table.gpus, affinity, strict=True)),
    }


def test_all_machines_are_here() -> None:
    assert len(MACHINES) == 12


@pytest.mark.parametrize("machine", MACHINES)
def test_machine(machine: str) -> None:
    expected = json.loads((DATA / "topo" / f"{machine}.expected.json").read_text(encoding="utf-8"))
    assert as_json(link_table(machine)) == expected


def test_links_and_numa_nodes_of_a_gpu() -> None:
    table = link_table("dgx_a100_mlx5_names")
    assert table.links_of(2) == ("NV12", "NV12", "X", "NV12", "NV12", "NV12", "NV12", "NV12")
    assert [table.numa_node_of(gpu) for gpu in range(8)] == [3, 3, 1, 1, 7, 7, 5, 5]
    assert link_table("v100_8gpu_cube_mesh").numa_node_of(0) is None


@pytest.mark.parametrize(
    ("affinity", "node"), [("3", 3), ("0,3-9,11-17", 0), ("1,18-33", 1), ("0-1", None), ("N/A", None)]
)
def test_numa_node_of_lists_and_ranges(affinity: str, node: int | None) -> None:
    table = parse_topo(f"\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-7\t{affinity}\n")
    assert table.numa_node_of(0) == node


@pytest.mark.parametrize(
    ("change", "into"),
    [
        (HEADER, "\x1b[4m" + HEADER.rstrip() + "\x1b[0m\n"),  # as printed, also into a pipe
        (HEADER, HEADER.replace("\t", "")),  # a paste that lost its separators
        (HEADER, HEADER.replace("\t", "    ")),
        (HEADER, "$ nvidia-smi topo -m\n\n" + HEADER),
        ("\t\t\t\t\n", "\n"),  # NIC rows end in blank cells, or do not
        ("NV4\tPIX", "NV4PIX"),  # cells that a paste has glued together
        ("\n", "\r\n"),
        ("\t\t\t\t\n", "\nLegend:\n  X    = Self\n"),
        ("\t\t\t\t\n", "\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"),
        ("\t\t\t\t\n", "\n\nulimit soft: 1024\n"),
    ],
)
def test_same_table_in_other_dress(change: str, into: str) -> None:
    assert change in TWO_GPUS
    assert parse_topo(TWO_GPUS.replace(change, into)) == parse_topo(TWO_GPUS)


def test_paths_over_pcie_are_another_table_of_one_machine() -> None:
    """``topo -mp`` writes the way over PCIe where ``-m`` writes NVLink."""
    over_pcie = parse_topo(TWO_GPUS.replace("NV4", "SYS"))
    assert over_pcie.links_of(0) == ("X", "SYS")
    assert parse_topo(TWO_GPUS).links_of(0) == ("X", "NV4")


def test_blank_cpus_of_a_container() -> None:
    table = parse_topo(TWO_GPUS.replace("\t8-15\t1", "\t\t1"))
    assert table.numa_affinity == ("0", "1")


SAVE = "Save it with: nvidia-smi topo -m > FILE."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f'line 1 = "" (t): no line with the names of the GPUs follows. {SAVE}'),
        (
            "\nNo devices were found\n",
            f'line 2 = "No devices were found" (t): no line with the names of the GPUs follows. {SAVE}',
        ),
        (
            HEADER,
            'line 1 = "\\tGPU0\\tGPU1\\tNIC0\\tCPU Affinity\\tNUMA Affinity\\tGPU NUMA ID" (t): ends in '
            '"GPU0GPU1NIC0CPUAffinityNUMAAffinityGPUNUMAID", must end in CPU Affinity, NUMA Affinity, GPU NUMA ID '
            f"after one name for each of the 0 rows. {SAVE}",
        ),
        (
            "\tGPU0\nGPU0\t X \n",
            'line 1 = "\\tGPU0" (t): ends in "no CPU Affinity", must end in CPU Affinity, NUMA Affinity, GPU NUMA ID '
            f"after one name for each of the 1 rows. {SAVE}",
        ),
        (
            "GPU0\t X \t0-7\n",
            'line 1 = "GPU0\\t X \\t0-7" (t): ends in "GPU0X0-7", must end in CPU Affinity, NUMA Affinity, GPU NUMA ID '
            f"after one name for each of the 0 rows. {SAVE}",
        ),
        (
            TWO_GPUS.replace("GPU1\tNV4", "GPU2\tNV4"),
            'line 3 = "GPU2\\tNV4\\t X \\tSYS\\t8-15\\t1\\t\\tN/A" (t): GPU2 is not the next column of line 1. ' + SAVE,
        ),
        (  # a row that a narrow terminal has wrapped
            TWO_GPUS.replace("NV4\tPIX", "NV4\nPIX"),
            'line 3 = "PIX\\t0-7\\t0\\t\\tN/A" (t): PIX is not the next column of line 1. ' + SAVE,
        ),
        (
            TWO_GPUS.replace("X \tNV4", "X \tSOC"),
            'line 2 = "GPU0\\t X \\tSOC\\tPIX\\t0-7\\t0\\t\\tN/A" (t): "SOC" in column GPU1 must be one of NV#, PIX, '
            f"PXB, PHB, NODE, SYS. {SAVE}",
        ),
        (
            TWO_GPUS.replace("NIC0\tPIX\tSYS\t X \t\t\t\t", "NIC0\tPIX"),
            f'line 4 = "NIC0\\tPIX" (t): "" in column GPU1 must be one of NV#, PIX, PXB, PHB, NODE, SYS. {SAVE}',
        ),
        (
            TWO_GPUS.replace("GPU1\tNV4\t X ", "GPU1\t X \tNV4"),
            'line 3 = "GPU1\\t X \\tNV4\\tSYS\\t8-15\\t1\\t\\tN/A" (t): column GPU0 is X; X must stand in column GPU1 '
            "alone.",
        ),
        (
            TWO_GPUS.replace("GPU1\tNV4", "GPU1\tNV2"),
            'line 3 = "GPU1\\tNV2\\t X \\tSYS\\t8-15\\t1\\t\\tN/A" (t): column GPU0 is NV2, but line 2 says NV4. Run '
            "nvidia-smi again.",
        ),
        (
            TWO_GPUS.replace("\t8-15\t1\t\tN/A", "\t8-15"),
            'line 3 = "GPU1\\tNV4\\t X \\tSYS\\t8-15" (t): 1 values follow the cells, must be 3: CPU Affinity, '
            "NUMA Affinity, GPU NUMA ID.",
        ),
        (
            TWO_GPUS.replace("NIC0\tPIX\tSYS\t X \t\t\t\t", "NIC0\tPIX\tSYS\t X \t0-7"),
            f'line 4 = "NIC0\\tPIX\\tSYS\\t X \\t0-7" (t): "0-7" follows the cells, and NIC0 has no affinity. {SAVE}',
        ),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(TopologyError) as error:
        parse_topo(text, name="t")
    assert str(error.value) == message
