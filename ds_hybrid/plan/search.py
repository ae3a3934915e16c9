"""All ways to train a model on a cluster: those that can be run and fit, quickest first, and why others are not. Pure.

All take the same sequences in a step: ranks that share a micro-batch take several of them, one after the other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

from ds_hybrid.config import find_problems
from ds_hybrid.dispatch.modes import ALL_MODES, Mode
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.ds_config import to_ds_config
from ds_hybrid.plan.machine import Machine
from ds_hybrid.plan.memory import Memory, memory
from ds_hybrid.plan.model import ModelShape
from ds_hybrid.plan.routing import RankDemand, RoutingLaw
from ds_hybrid.plan.sequence import Gathers, gathers
from ds_hybrid.plan.time import DispatchCost, Rings, StepTime, dispatch_cost, ring_groups, slowest_ring, step_time
from ds_hybrid.topology.cluster import Cluster
from ds_hybrid.topology.layout import Layout, consecutive_groups, plan_layout

TOO_LARGE = "need more memory than a rank has"
BEATEN = "are slower than the same sizes with another dispatcher, checkpoints or loss"


@dataclass(frozen=True, eq=False)
class Request:
    """What is to be trained, and on what.

    Attributes:
        zero_stages: those to look at.
        global_batch: sequences of a step; None: a micro-batch for each rank.
    """

    model: ModelShape
    work: Workload
    machine: Machine
    cluster: Cluster
    law: RoutingLaw
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    global_batch: int | None = None

    @property
    def num_sequences(self) -> int:
        """Of a step, of all ranks."""
        return self.global_batch or self.cluster.num_ranks * self.work.micro_batch

    def micro_batches(self, num_sharing: int) -> int:
        """Of a step, where so many ranks share each; 0 where they do not divide the sequences."""
        at_once = self.cluster.num_ranks // num_sharing * self.work.micro_batch
        return 0 if self.num_sequences % at_once else self.num_sequences // at_once


@dataclass(frozen=True, eq=False)
class Estimate:
    """What is predicted of a candidate.

    Attributes:
        tokens_per_second: of all ranks together.
        num_hosts_of_group: the hosts that the widest expert-parallel group spans.
        gathered: keys and values that ranks of a sequence exchange, in a micro-batch.
    """

    candidate: Candidate
    memory: Memory
    time: StepTime
    dispatch: DispatchCost
    demand: RankDemand
    tokens_per_second: float
    num_hosts_of_group: int
    gathered: Gathers

    @property
    def shares(self) -> list[tuple[str, float]]:
        """The parts of the step's time, the largest first; each as a part of 1."""
        total = self.time.total
        return sorted(((name, part / total) for name, part in self.time.parts.items()), key=lambda part: -part[1])


@dataclass(frozen=True, eq=False)
class Findings:
    """What a search found.

    Attributes:
        fitting: the best of each choice of sizes, most tokens per second first.
        nearest: when nothing fits, the one of each choice of sizes that needs the least memory, least first.
        dropped: reason -> how many combinations it drops.
        num_combinations: of sizes, ZeRO stage, dispatcher, checkpoints and loss.
    """

    fitting: tuple[Estimate, ...]
    nearest: tuple[Estimate, ...]
    dropped: Mapping[str, int]
    num_combinations: int


class Estimator:
    """Predicts candidates of one request. What several of them share is worked out once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        # Bound methods in a cache live as long as this object.
        self.layout = cache(self._layout)
        self._group = cache(self._widest_group)
        self._slowest = cache(partial(slowest_ring, request.machine, request.cluster))
        self._rings = cache(self._slowest_rings)
        self._num_hosts = cache(self._count_hosts)
        self._demand = cache(request.law.demand)
        self._costs: dict[tuple[tuple[int, ...], Mode, float], DispatchCost] = {}
        self._gathers = cache(self._gathers_of)
        self.memory = cache(self._memory)

    def __call__(self, candidate: Candidate) -> Estimate:
        request = self.request
        speeds = self._rings(candidate.tp_size, candidate.ep_size, candidate.sp_size)
        group = self._group(candidate.tp_size, candidate.ep_size)
        demand, gathered = self._demand_of(candidate), self._gathers(candidate.sp_size, candidate.checkpoints)
        dispatched = self._dispatch_cost(candidate, demand)
        time = step_time(request.model, request.work, candidate, demand, request.machine, speeds, dispatched, gathered)
        return Estimate(
            candidate=candidate,
            memory=self.memory(candidate),
            time=time,
            dispatch=dispatched,
            demand=demand,
            tokens_per_second=request.num_sequences * request.work.seq_len / time.total,
            num_hosts_of_group=self._num_hosts(group),
            gathered=gathered,
        )

    def _memory(self, candidate: Candidate) -> Memory:
        held = self._gathers(candidate.sp_size, candidate.checkpoints).held
        return memory(self.request.model, self.request.work, candidate, self._demand_of(candidate), held=held)

    def _layout(self, tp_size: int, ep_size: int) -> Layout:
        world_size = self.request.cluster.num_ranks
        # Beside tensor parallelism DeepSpeed makes the groups, from consecutive ranks.
        groups = consecutive_groups(world_size, ep_size) if tp_size > 1 else None
        return plan_layout(
            self.request.cluster, world_size=world_size, tp_size=tp_size, ep_size=ep_size, expert_groups=groups
        )

    def _widest_group(self, tp_size: int, ep_size: int) -> tuple[int, ...]:
        return widest_group(self.layout(tp_size, ep_size), self.request.cluster)

    def _slowest_rings(self, tp_size: int, ep_size: int, sp_size: int) -> Rings:
        kinds = ring_groups(self.layout(tp_size, ep_size), self.request.cluster.num_ranks, sp_size)
        return Rings(*(self._slowest(groups) for groups in kinds))

    def _count_hosts(self, group: tuple[int, ...]) -> int:
        return len({self.request.cluster.host_of_rank[rank] for rank in group})

    def _gathers_of(self, sp_size: int, checkpoints: bool) -> Gathers:
        request = self.request
        candidate = Candidate(request.cluster.num_ranks, 1, 1, 1, "allgather", checkpoints, sp_size=sp_size)
        return gathers(request.model, request.work, candidate, request.machine, self._rings(1, 1, sp_size).sp)

    def _demand_of(self, candidate: Candidate) -> RankDemand:
        # Shares of nodes only matter to the dispatcher that goes over them, which has equal ones.
        over_hosts = candidate.mode == "hierarchical"
        group = self._group(candidate.tp_size, candidate.ep_size)
        return self._demand(candidate.ep_size, self._num_hosts(group) if over_hosts else 1)

    def _dispatch_cost(self, candidate: Candidate, demand: RankDemand) -> DispatchCost:
        """The same for all candidates of one group, mode and number of tokens."""
        request = self.request
        group = self._group(candidate.tp_size, candidate.ep_size)
        num_tokens = candidate.tokens_dispatched(candidate.part_of(request.work).num_tokens)
        key = group, candidate.mode, num_tokens
        if key not in self._costs:
            self._costs[key] = dispatch_cost(
                request.model, request.work, candidate, demand, request.machine, request.cluster, group
            )
        return self._costs[key]


def search(request: Request) -> Findings:
    """Try every combination. One that another of the same sizes beats is left out."""
    estimator = Estimator(request)
    refusal = _Refusal(estimator)
    dropped = Counter[str]()
    fitting: dict[str, Estimate] = {}
    smallest: dict[str, tuple[float, Candidate]] = {}
    candidates = []
    num_combinations = 0
    for plain in _without_savings(request):
        num_combinations += len(_SAVINGS)
        reason = refusal(plain)
        if reason is None:
            candidates += _with_savings(plain)
        else:
            dropped[reason] += len(_SAVINGS)
    for candidate in candidates:
        peak = estimator.memory(candidate).peak
        if peak > request.machine.memory_bytes:
            dropped[TOO_LARGE] += 1
            if candidate.sizes not in smallest or peak < smallest[candidate.sizes][0]:
                smallest[candidate.sizes] = peak, candidate
            continue
        estimate, rival = estimator(candidate), fitting.get(candidate.sizes)
        dropped[BEATEN] += rival is not None
        if rival is None or _rank(estimate) < _rank(rival):
            fitting[candidate.sizes] = estimate
    nearest = sorted(smallest.values(), key=lambda found: found[0])
    return Findings(
        fitting=tuple(sorted(fitting.values(), key=_rank)),
        nearest=() if fitting else tuple(estimator(candidate) for _, candidate in nearest),
        dropped={reason: count for reason, count in dropped.most_common() if count},
        num_combinations=num_combinations,
    )


def best_of_sizes(request: Request, tp_size: int, ep_size: int, mode: Mode) -> Estimate | str:
    """The quickest of given sizes and dispatcher, without sequence parallelism, that fits; if none does, the smallest;
    where none can be run, why.
    """
    estimator = Estimator(request)
    refusal = _Refusal(estimator)
    world_size = request.cluster.num_ranks
    if world_size % tp_size or world_size % ep_size:
        return f"have TP {tp_size} or EP {ep_size}, which does not divide {world_size} ranks"
    estimates: list[Estimate] = []
    reasons = []
    for plain in _without_savings(request):
        if (plain.tp_size, plain.ep_size, plain.mode, plain.sp_size) == (tp_size, ep_size, mode, 1):
            reason = refusal(plain)
            if reason is None:
                estimates += map(estimator, _with_savings(plain))
            else:
                reasons.append(reason)
    fitting = [estimate for estimate in estimates if estimate.memory.peak <= request.machine.memory_bytes]
    best = min(fitting, key=_rank, default=None) or min(estimates, key=lambda e: e.memory.peak, default=None)
    return best or reasons[-1]


def widest_group(layout: Layout, cluster: Cluster) -> tuple[int, ...]:
    """The expert-parallel group over the most hosts."""
    return max(layout.ep_groups, key=lambda group: len({cluster.host_of_rank[rank] for rank in group}))


def _rank(estimate: Estimate) -> tuple[float, bool, bool, float]:
    """A sort key: by speed to four digits; of equals the one that asks less of the training script comes first."""
    candidate = estimate.candidate
    speed = float(f"{estimate.tokens_per_second:.4g}")
    return -speed, candidate.checkpoints, candidate.chunked_loss, estimate.memory.peak


_SAVINGS = tuple(product((False, True), repeat=2))
"""Activation checkpoints, and a loss in chunks."""


def _without_savings(request: Request) -> Iterator[Candidate]:
    """Every combination of sizes, ZeRO stage and dispatcher."""
    world_size = request.cluster.num_ranks
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    # Ranks share a micro-batch by its heads or by its sequences: the engine has not both.
    sharing = [(size, 1) for size in sizes] + [(1, size) for size in sizes if size > 1]
    for (tp_size, sp_size), ep_size, stage, mode in product(sharing, sizes, request.zero_stages, ALL_MODES):
        micro_batches = request.micro_batches(tp_size * sp_size)
        yield Candidate(world_size, tp_size, ep_size, stage, mode, sp_size=sp_size, micro_batches=micro_batches)


def _with_savings(plain: Candidate) -> list[Candidate]:
    return [replace(plain, checkpoints=checkpoints, chunked_loss=chunked) for checkpoints, chunked in _SAVINGS]


def _without_sizes(problem: str) -> str:
    """The key and the first sentence of the rule, the same for all sizes."""
    place, _, rule = problem.partition(" (plan): ")
    return f"{place.partition(' = ')[0]} {re.sub(r'[0-9]+', 'N', rule.partition('. ')[0])}"


class _Refusal:
    """Why a candidate cannot be run at all, or None; savings change nothing about it. Cheap rules first."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator

    def __call__(self, candidate: Candidate) -> str | None:
        request = self._estimator.request
        model = request.model
        if model.attention.num_heads % candidate.tp_size or model.attention.num_kv_heads % candidate.tp_size:
            return f"have a TP size that does not divide {model.attention.num_kv_heads} key and value heads"
        if model.num_experts % candidate.ep_size:
            return f"have an EP size that does not divide {model.num_experts} experts"
        if candidate.sp_size > 1 and 2 * candidate.sp_size > request.work.seq_len:
            return "share a sequence out over more ranks than it has pairs of tokens"
        if candidate.micro_batches == 0:
            return f"do not divide the {request.num_sequences} sequences of a step"
        if candidate.ep_size == 1 and candidate.mode != "allgather":
            return "name a dispatcher where nothing is dispatched (EP 1)"
        if candidate.mode == "replicated" and candidate.ep_size != candidate.tp_size:
            return "name a dispatcher for expert groups that are the tensor-parallel groups, where they are not"
        if candidate.mode == "hierarchical" and not self._has_two_hops(candidate.tp_size, candidate.ep_size):
            return "name a dispatcher over hosts for groups that do not span several with equal shares"
        document = to_ds_config(model, request.work, candidate)
        problems = find_problems(document, name="plan", world_size=candidate.world_size, num_experts=model.num_experts)
        return f"are refused by ds_hybrid validate: {_without_sizes(problems[0])}" if problems else None

    def _has_two_hops(self, tp_size: int, ep_size: int) -> bool:
        hierarchies = self._estimator.layout(tp_size, ep_size).hierarchies
        return all(hierarchy is not None and len(hierarchy.inside[0]) > 1 for hierarchy in hierarchies)
