"""What an expert's work and an expert's move take, measured on the running ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.hierarchical import CutByNodes
from ds_hybrid.dispatch.measure import measure_link
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.errors import HybridError, PlacementError
from ds_hybrid.moe.kinds import MoELayer
from ds_hybrid.rebalance.fragments import StateFinder
from ds_hybrid.rebalance.migrate import ExpertGrid, expert_bytes
from ds_hybrid.rebalance.policy import Costs, EventCost
from ds_hybrid.topology.cluster import Cluster

_FORWARD_AND_BACKWARD = 3
"""A matrix product has two of its size in backward. Recomputation is left out, so gains are rather under-estimated."""


class CostMeter:
    """Measures for all layers together; all ranks see the same figures.

    Args:
        layers: of the model, in one order on every rank.
        grids: by the number of expert-parallel ranks.
        groups: all expert-parallel groups, likewise.
        cut_by_nodes: gives the parts of an expert-parallel group that lies on several nodes.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        grids: Mapping[int, ExpertGrid],
        groups: Mapping[int, Sequence[Sequence[int]]],
        cluster: Cluster,
        cut_by_nodes: CutByNodes,
    ) -> None:
        self._layers = layers
        self._grids = grids
        self._cut_by_nodes = cut_by_nodes
        self._nodes = {
            size: tuple(cluster.host_of_rank[rank] for rank in of_size[0]) for size, of_size in groups.items()
        }
        self._seconds_per_byte: dict[int, tuple[float, float]] = {}
        self._seconds_before = [0.0] * len(layers)
        self._num_pairs = [0] * len(layers)
        self._has_begun = False
        self._seconds_per_pair = [0.0] * len(layers)
        self._event = EventCost()

    def node_of_rank(self, layer: MoELayer) -> tuple[int, ...]:
        """The node of each rank of the layer's first expert-parallel group."""
        return self._nodes[layer.ep_size]

    def begin(self) -> None:
        """Forget the step that is over, the first one: kernels were loaded and tuned in it. Its pairs come next."""
        self._seconds_before = [layer.meter.computing.total() for layer in self._layers]
        self._has_begun = False

    def count(self, num_pairs: Sequence[int]) -> None:
        """Note the (token, choice) pairs that each layer's experts worked on in a step, all ranks together."""
        if not self._has_begun:
            self._has_begun = True
            return
        self._num_pairs = [before + more for before, more in zip(self._num_pairs, num_pairs, strict=True)]

    def add_event(self, seconds: float) -> None:
        """Note what a rebalance has taken besides its moves, on the slowest rank."""
        self._event = self._event.after(_largest([max(seconds, 0.0)])[0])

    def refuse_event(self) -> None:
        """Note that an event costs too much for what it would bring."""
        self._event = self._event.refused()

    def measure(self, optimizer: Any) -> list[Costs]:
        """The costs of each layer since the last time. Collective over all ranks; waits for the device.

        Raises:
            PlacementError: on every rank, when the optimizer keeps what experts cannot take along.
        """
        totals = [layer.meter.computing.total() for layer in self._layers]
        spent = [total - before for total, before in zip(totals, self._seconds_before, strict=True)]
        # As integers, whose sum is the same on every rank: decisions rest on it.
        spent_on_all = _reduced([round(1e9 * seconds) for seconds in spent], dist.ReduceOp.SUM)
        for number, layer in enumerate(self._layers):
            if self._num_pairs[number]:
                num_replicas = len(self._grids[layer.ep_size].ranks)  # which share the pairs of their experts
                self._seconds_per_pair[number] = 1e-9 * spent_on_all[number] / self._num_pairs[number] / num_replicas
        self._seconds_before, self._num_pairs = totals, [0] * len(self._layers)
        moved = _largest(self._bytes_of_experts(optimizer))
        if inf in moved:
            raise PlacementError("experts cannot move with the optimizer's state; the ranks concerned have told why.")
        return [self._costs_of(number, layer, moved[number]) for number, layer in enumerate(self._layers)]

    def _bytes_of_experts(self, optimizer: Any) -> list[float]:
        """By layer; infinite where the state cannot move."""
        finder = StateFinder(optimizer)
        try:
            return [float(expert_bytes(layer, finder)) for layer in self._layers]
        except PlacementError as error:
            logger.warning(f"ds_hybrid: rebalance: {error}")
            return [inf] * len(self._layers)

    def _costs_of(self, number: int, layer: MoELayer, num_bytes: float) -> Costs:
        inside, across = self._links(layer)
        return Costs(
            seconds_per_pair=_FORWARD_AND_BACKWARD * self._seconds_per_pair[number],
            seconds_per_move=num_bytes * inside,
            seconds_per_move_across=num_bytes * across,
            seconds_per_event=self._event.seconds,
        )

    def _links(self, layer: MoELayer) -> tuple[float, float]:
        """Seconds per byte inside a node and across, on the slowest rank; measured once."""
        if layer.ep_size not in self._seconds_per_byte:
            group = layer.switch.group
            ways = [group, group]
            if len(set(self.node_of_rank(layer))) > 1:
                try:
                    nodes = self._cut_by_nodes(group.process_group).with_meter(Meter())
                    ways = [nodes.inside, nodes.across]
                except HybridError:  # each rank on its own node, or nodes of different size: one speed for all
                    pass
            speeds = [measure_link(RankGroup(way.process_group, Meter())) for way in ways] if group.size > 1 else []
            inside, across = _largest([1 / speed.bandwidth for speed in speeds] or [0.0, 0.0])
            self._seconds_per_byte[layer.ep_size] = inside, across
        return self._seconds_per_byte[layer.ep_size]


def _largest(values: Sequence[float]) -> list[float]:
    return _reduced(values, dist.ReduceOp.MAX)


def _reduced(values: Sequence[float], how: Any) -> list[float]:
    dtype = torch.int64 if all(isinstance(value, int) for value in values) else torch.float64
    total = torch.tensor(values, dtype=dtype, device=get_accelerator().current_device_name())
    dist.all_reduce(total, op=how)
    reduced: list[float] = total.tolist()
    return reduced
