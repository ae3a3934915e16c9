"""A run step by step: what dispatchers, layouts and rebalancing make of routing that changes. Pure NumPy.

Ranks are thought of in expert-parallel groups. All groups route by the same popularity and place experts alike, so a
layer has one placement and one mean load for each place of a group. What differs are the tokens: the pairs that reach a
place of a group are drawn around the mean, as if each token were routed on its own, which makes groups more alike than
real text does. Groups wait for each other once a step, at the gradients; inside a group the busiest rank sets the pace
of each layer. Messages take the mean demand of the step. The rest of a step is that of ``plan.time``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from ds_hybrid.config import find_problems
from ds_hybrid.dispatch.modes import Mode, WireDtype
from ds_hybrid.dispatch.traffic import WireShape
from ds_hybrid.errors import ConfigError
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.dispatch_run import Demands, DispatchRun, dispatch_run
from ds_hybrid.plan.ds_config import to_ds_config
from ds_hybrid.plan.machine import Machine
from ds_hybrid.plan.memory import memory
from ds_hybrid.plan.model import ModelShape
from ds_hybrid.plan.popularity import Popularity, of_run
from ds_hybrid.plan.routing import chance_of_need, read_routing
from ds_hybrid.plan.search import widest_group
from ds_hybrid.plan.sequence import gathers
from ds_hybrid.plan.time import DispatchCost, StepTime, dispatch_cost, group_links, nodes_of, rings, step_time
from ds_hybrid.plan.windows import RebalancePolicy, windows
from ds_hybrid.rebalance.algorithms import Algorithm
from ds_hybrid.rebalance.policy import Costs
from ds_hybrid.topology.cluster import Cluster
from ds_hybrid.topology.layout import consecutive_groups, plan_layout

FloatArray = npt.NDArray[np.float64]

_STEPS_AT_A_TIME = 50
_FLOAT = 4


@dataclass(frozen=True, eq=False)
class Setting:
    """What trains, and on what.

    Attributes:
        work: one micro-batch of a tensor-parallel group.
        cluster: ``machine``'s; ranks of expert-parallel groups are consecutive.
        checkpoints: layers are computed again in backward, and the loss is taken in chunks.
        sp_size: consecutive ranks that share out each sequence; then ``tp_size`` is 1.
        hides_gathers: whether they gather keys and values beside attention.
        micro_batches: of a step.
        event_seconds: what a rebalance takes besides its moves: planning, agreeing, waiting for each other.
    """

    model: ModelShape
    work: Workload
    machine: Machine
    cluster: Cluster
    tp_size: int = 1
    zero_stage: int = 1
    wire_dtype: WireDtype = "auto"
    checkpoints: bool = False
    sp_size: int = 1
    hides_gathers: bool = True
    micro_batches: int = 1
    event_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Outcome:
    """One dispatcher, size of groups and rebalancing.

    Attributes:
        step_seconds: [S]: of the slowest rank of all.
        expert_seconds: [S]: of those the experts', layer by layer of the busiest rank of the slowest group.
        dispatch_seconds, moving_seconds: [S]: of those the exchanges', and moving experts before the step.
        imbalance: [S]: expert_seconds over those of even loads.
        rest: the same in every step; its experts and dispatch are 0.
        peak_memory: bytes of the rank that needs the most, experts where they begin, routing as in ``plan.memory``.
        wire_bytes: [S]: what leaves all ranks in dispatch.
        num_moves, num_moves_across: experts that changed rank in one group; of those, across nodes.
        moved_bytes: over all groups.
        tokens_per_step: of all ranks.
    """

    mode: Mode
    ep_size: int
    algorithm: Algorithm
    step_seconds: FloatArray
    expert_seconds: FloatArray
    dispatch_seconds: FloatArray
    moving_seconds: FloatArray
    imbalance: FloatArray
    rest: StepTime
    peak_memory: float
    wire_bytes: FloatArray
    num_moves: int
    num_moves_across: int
    moved_bytes: float
    tokens_per_step: float

    def fits(self, machine: Machine) -> bool:
        """Whether a rank of such a machine has that much memory."""
        return self.peak_memory <= machine.memory_bytes

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step * len(self.step_seconds) / float(self.step_seconds.sum())


def simulate(
    setting: Setting,
    popularity: Popularity,
    *,
    modes: Sequence[Mode],
    ep_sizes: Sequence[int],
    policies: Sequence[RebalancePolicy],
) -> list[Outcome]:
    """Every combination, in the order of ep_sizes, policies, modes.

    A model with more layers than were recorded has several like each of them.

    Raises:
        ConfigError: a dispatcher cannot serve a size, or it cannot be trained so.
        PlacementError: a size does not divide the experts.
        TopologyError: a size does not divide the ranks.
    """
    setting = replace(setting, model=of_run(setting.model, popularity))
    outcomes = []
    for ep_size in ep_sizes:
        group = _Group(setting, popularity, ep_size)
        for mode in modes:
            group.check(mode)
        outcomes += [outcome for policy in policies for outcome in group.play(policy, modes)]
    return outcomes


class _Group:
    """Expert-parallel groups of one size: what is the same for every policy."""

    def __init__(self, setting: Setting, popularity: Popularity, ep_size: int) -> None:
        model, cluster = setting.model, setting.cluster
        world_size = cluster.num_ranks
        ExpertPlacement.contiguous(model.num_experts, ep_size)  # refuses sizes that do not divide
        layout = plan_layout(
            cluster,
            world_size=world_size,
            tp_size=setting.tp_size,
            ep_size=ep_size,
            expert_groups=consecutive_groups(world_size, ep_size) if world_size % ep_size == 0 else None,
        )
        self._setting, self._popularity, self._ep_size = setting, popularity, ep_size
        self._ranks = widest_group(layout, cluster)
        nodes = nodes_of(self._ranks, cluster)
        sizes = {nodes.count(node) for node in nodes}
        # Nodes of unequal shares are taken as one where experts are placed; no dispatcher goes over them.
        self._nodes = nodes if len(sizes) == 1 else (0,) * ep_size
        self._num_nodes = len(set(self._nodes))
        self._num_groups = world_size // ep_size
        self._repeats = model.num_moe_layers / popularity.num_layers
        self._tokens = setting.work.num_tokens / (setting.tp_size * setting.sp_size)
        self._peak = cache(self._peak_memory)
        self._demand = read_routing("uniform", model).demand(ep_size)
        self._layout = layout
        self._even_experts = self._even("two_stage").experts

    def check(self, mode: Mode) -> None:
        """Whether the dispatcher can serve these groups."""
        where = f"--dispatch {mode} with EP {self._ep_size}, TP {self._setting.tp_size}"
        if mode == "replicated" and self._ep_size != self._setting.tp_size:
            raise ConfigError(f"{where}: expert groups must be the tensor-parallel groups. Give --tp {self._ep_size}.")
        if mode == "hierarchical" and not 1 < self._num_nodes < self._ep_size:
            raise ConfigError(
                f"{where}: a group must span several hosts of {self._setting.machine.ranks_per_host} ranks, with "
                "several ranks of each. Give another --ep, or two_stage."
            )
        heads, kv_heads = (getattr(self._setting.model.attention, name) for name in ("num_heads", "num_kv_heads"))
        if heads % self._setting.tp_size or kv_heads % self._setting.tp_size:
            raise ConfigError(f"{where}: TP must divide {heads} heads and {kv_heads} key and value heads.")
        document = to_ds_config(self._setting.model, self._setting.work, self._candidate(mode))
        num_ranks, num_experts = self._setting.cluster.num_ranks, self._setting.model.num_experts
        problems = find_problems(document, name="its ds_config", world_size=num_ranks, num_experts=num_experts)
        if problems:
            raise ConfigError(f"{where}, ZeRO {self._setting.zero_stage} cannot be trained: {problems[0]}")

    def play(self, policy: RebalancePolicy, modes: Sequence[Mode]) -> Iterator[Outcome]:
        num_steps = len(self._popularity.weights)
        experts = np.zeros((num_steps, self._num_groups))
        seconds = {mode: np.zeros(num_steps) for mode in modes}
        sent = {mode: np.zeros(num_steps) for mode in modes}
        moving = np.zeros(num_steps)
        num_moves = num_moves_across = 0
        dispatchers = {mode: self._dispatcher(mode) for mode in modes}
        rng = np.random.default_rng(0)
        for window in windows(self._popularity, self._ep_size, policy, self._costs(), node_of_rank=self._nodes):
            num_moves, num_moves_across = num_moves + window.num_moved, num_moves_across + window.num_moved_across
            moving[window.first] = window.seconds * self._repeats
            for first in range(window.first, window.last, _STEPS_AT_A_TIME):
                steps = slice(first, min(first + _STEPS_AT_A_TIME, window.last))
                for layer, placement in enumerate(window.placements):
                    demands = self._demands(steps, layer, placement, modes)
                    experts[steps] += self._busiest(demands.pairs, rng)
                    for mode, dispatcher in dispatchers.items():
                        took, left = dispatcher(demands).with_forwards(2 if self._setting.checkpoints else 1)
                        seconds[mode][steps] += took
                        sent[mode][steps] += left
        pairs_of_rank = self._tokens * self._setting.model.top_k * self._popularity.num_layers
        imbalance = experts.max(1) / pairs_of_rank
        for mode in modes:
            rest = replace(self._even(mode), experts=0.0)
            num_dispatches = self._repeats * self._setting.micro_batches
            dispatch = seconds[mode] * num_dispatches
            yield Outcome(
                mode=mode,
                ep_size=self._ep_size,
                algorithm=policy.algorithm,
                step_seconds=rest.total + imbalance * self._even_experts + dispatch + moving,
                expert_seconds=imbalance * self._even_experts,
                dispatch_seconds=dispatch,
                moving_seconds=moving,
                imbalance=imbalance,
                rest=rest,
                peak_memory=self._peak(mode),
                wire_bytes=sent[mode] * num_dispatches * self._num_groups,
                num_moves=round(num_moves * self._repeats),
                num_moves_across=round(num_moves_across * self._repeats),
                moved_bytes=num_moves * self._repeats * self._num_groups * self._bytes_of_expert,
                tokens_per_step=self._tokens * self._setting.micro_batches * self._setting.cluster.num_ranks,
            )

    def _even(self, mode: Mode) -> StepTime:
        """A step without dispatch, all loads even. Dispatchers differ in what they keep and join."""
        setting = self._setting
        model, work, machine, candidate = setting.model, setting.work, setting.machine, self._candidate(mode)
        speeds = rings(machine, setting.cluster, self._layout, setting.sp_size)
        gathered = gathers(model, work, candidate, machine, speeds.sp)
        if not setting.hides_gathers:
            gathered = replace(gathered, exposed=gathered.exposed + gathered.hidden, hidden=0.0)
        nothing = DispatchCost(0.0, 0.0, 0.0)
        return step_time(model, work, candidate, self._demand, machine, speeds, nothing, gathered)

    def _peak_memory(self, mode: Mode) -> float:
        setting = self._setting
        demand = self._popularity.law().demand(self._ep_size, self._num_nodes if mode == "hierarchical" else 1)
        candidate = self._candidate(mode)
        speed = rings(setting.machine, setting.cluster, self._layout, setting.sp_size).sp
        held = gathers(setting.model, setting.work, candidate, setting.machine, speed).held
        return memory(setting.model, setting.work, candidate, demand, held=held).peak

    def _candidate(self, mode: Mode) -> Candidate:
        setting = self._setting
        return Candidate(
            setting.cluster.num_ranks,
            setting.tp_size,
            self._ep_size,
            setting.zero_stage,
            mode,
            setting.checkpoints,
            chunked_loss=setting.checkpoints,
            sp_size=setting.sp_size,
            micro_batches=setting.micro_batches,
        )

    @property
    def _bytes_of_expert(self) -> float:
        """What moves in one group, as ``plan.states`` has it: the weight, with ZeRO 3 this group's share of it; from
        ZeRO 1 on the share of float32 master and moments, without ZeRO all of them.
        """
        stage, weight = self._setting.zero_stage, self._setting.work.value_bytes
        has_master = stage > 0 or weight < _FLOAT
        states = (3 if has_master else 2) * _FLOAT / (self._num_groups if stage else 1)
        weight_moved = weight / (self._num_groups if stage == 3 else 1)
        return self._setting.model.parameters_of_expert * (weight_moved + states)

    def _costs(self) -> Costs:
        """For pairs in the units of the weights, whose layers stand for ``repeats`` each, as their moves do."""
        machine, weights = self._setting.machine, self._popularity.weights
        pairs = float(weights.sum(dtype=np.float64)) / (weights.shape[0] * weights.shape[1])
        return Costs(
            seconds_per_pair=self._even_experts / self._setting.model.num_moe_layers * self._ep_size / pairs,
            seconds_per_move=self._bytes_of_expert / machine.inside.bandwidth,
            seconds_per_move_across=self._bytes_of_expert / machine.across.bandwidth,
            seconds_per_event=self._setting.event_seconds / self._repeats,
        )

    def _demands(self, steps: slice, layer: int, placement: ExpertPlacement, modes: Sequence[Mode]) -> Demands:
        chances = self._popularity.inclusion(steps.start, steps.stop, layer)
        by_slot = chances[:, placement.expert_of_slot.ravel()]
        top_k, num_steps = self._popularity.top_k, len(chances)
        blocks = by_slot.reshape(num_steps, self._ep_size, -1)
        needs_rows = {"two_stage", "hierarchical"} & set(modes)
        return Demands(
            pairs=blocks.sum(2),
            rows=chance_of_need(blocks, top_k) if needs_rows else blocks.sum(2),
            rows_to_node=chance_of_need(by_slot.reshape(num_steps, self._num_nodes, -1), top_k)
            if "hierarchical" in modes
            else np.zeros((num_steps, 0)),
        )

    def _busiest(self, pairs: FloatArray, rng: np.random.Generator) -> npt.NDArray[np.float32]:
        """[S, P] of a token -> [S, groups]: pairs of the busiest rank of each group, over its tokens as drawn."""
        num_tokens = self._tokens * self._ep_size
        mean = num_tokens * pairs
        deviation = np.sqrt(mean * np.maximum(1 - pairs / self._popularity.top_k, 0))
        drawn = rng.standard_normal((*pairs.shape, self._num_groups), dtype=np.float32)
        drawn *= deviation[..., None].astype(np.float32)
        drawn += mean[..., None].astype(np.float32)
        busiest: npt.NDArray[np.float32] = drawn.max(1)
        return busiest

    def _dispatcher(self, mode: Mode) -> Callable[[Demands], DispatchRun]:
        """One layer's seconds and bytes for any demands."""
        setting, model = self._setting, self._setting.model
        if mode == "replicated":
            cost = dispatch_cost(
                model,
                setting.work,
                self._candidate(mode),
                self._demand,
                setting.machine,
                setting.cluster,
                self._ranks,
            )
            # Forward adds up the output; backward the gradients of as many values, and of the routing weights.
            output = model.hidden_size * setting.work.value_bytes
            part = output / (2 * output + _FLOAT * model.top_k)
            figures = (cost.seconds, cost.wire_bytes, part * cost.seconds, part * cost.wire_bytes)
            return lambda demands: DispatchRun(*(np.full(len(demands.pairs), figure) for figure in figures))
        shape = WireShape(
            self._ep_size,
            model.num_experts,
            model.top_k,
            model.hidden_size,
            setting.work.value_bytes,
            wire_dtype=setting.wire_dtype,
        )
        links = group_links(setting.machine, setting.cluster, self._ranks, mode)
        return lambda demands: dispatch_run(mode, demands, self._tokens, shape, links)
