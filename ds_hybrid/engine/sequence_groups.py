"""The ranks that share a sequence, and what DeepSpeed must know of them so that gradients come out right.

To ZeRO and to the experts, a rank with a part of a sequence is a rank with tokens of its own, like any other: states
are parted over all ranks, gradients are their mean over all ranks. Only samples are counted and dealt out by sequence.

DeepSpeed 0.19.8 has notions of sequence parallelism of its own, and none of them is right with experts at every stage.
With a mesh, ZeRO averages dense gradients over the data-parallel ranks alone
(``deepspeed.utils.groups._get_sequence_data_parallel_group``), and the ranks of one sequence drift apart. Where it
knows a ``sequence_parallel_size``, it divides by the number of sequences in place of ranks, but not the experts'
gradients without ZeRO, and nothing that stage 3 reduces and scatters (``__avg_scatter_grads``). So
:class:`SequenceGroups`, an mpu, leaves that size out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ds_hybrid.engine.groups import clone_of_world, make_consecutive_groups, make_own_group


@dataclass(frozen=True, eq=False)
class SequenceGroups:
    """The mpu of an engine whose sequences lie over ``size`` consecutive ranks each. Its methods are DeepSpeed's names.

    Attributes:
        size: ranks that share a sequence, n.
        rank: this rank's place among them, 0 to n-1.
        group: the process group of them.
        whole_world: all ranks, over which ZeRO parts states and sums gradients.
        own: this rank alone; there is no model parallelism.
    """

    size: int
    rank: int
    group: Any
    whole_world: Any
    own: Any

    @property
    def num_sequences(self) -> int:
        """Ranks that hold different sequences: the data-parallel size."""
        return dist.get_world_size() // self.size

    def get_sequence_data_parallel_group(self) -> Any:
        return self.whole_world

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_group(self) -> Any:
        """All ranks: over them DeepSpeed picks the one writer of a checkpoint, and parts parameters at stage 3."""
        return self.whole_world

    def get_data_parallel_world_size(self) -> int:
        """The number of sequences: with it DeepSpeed counts samples and deals them out."""
        return self.num_sequences

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // self.size

    def get_model_parallel_group(self) -> Any:
        return self.own

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


def make_sequence_groups(size: int) -> SequenceGroups:
    """Groups of ``size`` consecutive ranks, which launchers put on one host. Collective over all ranks."""
    group = make_consecutive_groups(size)
    return SequenceGroups(size, dist.get_rank(group), group, clone_of_world(), make_own_group())
