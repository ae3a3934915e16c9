"""From what a layer's experts are loaded with, and where they are, to where they should be.

Every algorithm keeps E/P experts on each of the P ranks and gives all ranks the same answer: loads become integers,
whose sums are exact in any order, and ties go to the lowest expert and rank. An expert that stays on its rank keeps its
slot, so only what changes rank has to travel.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hybrid.placement import ExpertPlacement, IntArray

Algorithm = Literal["swap", "lpt_swap", "lpt", "hierarchical", "article_round_robin", "static"]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Thresholds:
    """When ``swap`` stops.

    Attributes:
        target: how far above the mean the busiest rank may lie, as a fraction of it.
        price: what the busiest rank must lose for each expert that moves, as a fraction of the mean expert's load.
    """

    target: float
    price: float


DEFAULT_THRESHOLDS = Thresholds(target=0.02, price=0.012)
"""Two per cent is near what a forecast can tell: at a target of 0 and no price, seven times as many experts move, for
hardly more even ranks. The price drops what is left of such moves. docs/rebalance.md has the figures."""

CONVERGED = Thresholds(target=0.0, price=0.0)
"""As even as ``swap`` can, whatever moves: within 1 % of the integer optimum on the traces that it was tested with."""

# A rank that no move can relieve sets the pace. Of the others it is enough that they stay below so much of it: a load
# that drifts does not soon close the gap.
_CLEAR_OF_PACE = 0.9

_GOOD_ENOUGH = 1e-3  # for what starts from scratch: as a fraction of the bound, less than a forecast can tell
_TABU_STEPS = 10  # how long an expert may not go back to a rank that it left; 6 to 20 do as well on the traces
_MAX_DETOUR = 100  # swaps without a new best after which the search gives up; 400 finds hardly more


def new_placement(
    algorithm: Algorithm,
    load: npt.ArrayLike,
    current: ExpertPlacement,
    *,
    node_of_rank: Sequence[int] = (),
    cross_node_penalty: float = 1.0,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
) -> ExpertPlacement:
    """Where the experts of one layer should be. Same arguments, same answer, on any machine.

    No algorithm but ``article_round_robin`` returns a placement whose busiest rank has more than in ``current``.

    - ``swap``: the best exchanges between the busiest rank and others, from ``current``, as long as they bring their
      price; where none does, a detour of worse ones (tabu search). Another call with the same load moves nothing.
    - ``lpt_swap``: ``lpt``, then swaps until nothing improves; within 1 % of the integer optimum on the tested traces.
    - ``lpt``: longest processing time with equal counts: the heaviest expert first, to the least loaded rank with room.
      The packing of DeepSeek's EPLB without replicas.
    - ``hierarchical``: ``lpt_swap`` over nodes, then inside each node.
    - ``article_round_robin``: ascending by load, the i-th to rank i mod P. The last rank gets the heaviest of every
      row: for comparison only.
    - ``static``: ``current``.

    From scratch (the second to fourth), ranks are then renamed so that the fewest experts move.

    Args:
        load: [E], at least 0: what is forecast for each logical expert, in any unit.
        current: where they are.
        node_of_rank: for each rank the node that it is on, nodes of equal size; empty is one node. For ``swap`` and
            ``hierarchical``.
        cross_node_penalty: what a move across nodes costs compared with one inside. For ``swap``.
        thresholds: when ``swap`` stops.
    """
    loads = _exact(np.asarray(load, dtype=np.float64), current.num_experts)
    now, num_ranks = current.rank_of_expert, current.num_ranks
    nodes = np.asarray(node_of_rank or [0] * num_ranks, dtype=np.int64)
    assert len(nodes) == num_ranks, (len(nodes), num_ranks)
    if algorithm == "static":
        return current
    if algorithm == "article_round_robin":
        return _settled(_round_robin(loads, num_ranks), current)
    if algorithm == "swap":
        return _settled(_swapped(loads, now, _moving_prices(nodes, cross_node_penalty), thresholds), current)
    if algorithm == "hierarchical":
        ranks = _hierarchical(loads, now, nodes)
    else:
        ranks = _renamed(_from_scratch(loads, num_ranks, swap=algorithm == "lpt_swap"), now, num_ranks)
    better = rank_loads(loads, ranks, num_ranks).max() < rank_loads(loads, now, num_ranks).max()
    return _settled(ranks, current) if better else current


def rank_loads(load: FloatArray, rank_of_expert: IntArray, num_ranks: int) -> FloatArray:
    """[P] float64: what the experts of each rank have together; ``load`` [E]."""
    return np.bincount(rank_of_expert, weights=load, minlength=num_ranks).astype(np.float64)


def lower_bound(load: FloatArray, num_ranks: int) -> float:
    """The busiest rank cannot have less, however [E] experts are placed: the mean, or the heaviest expert with the
    lightest that can fill its rank."""
    rest = np.sort(load)[: len(load) // num_ranks - 1].sum()
    return float(max(load.sum() / num_ranks, load.max() + rest))


def _exact(load: FloatArray, num_experts: int) -> FloatArray:
    """Integers in place of loads, by a power of two: sums below are exact, in any order and at any scale."""
    assert load.shape == (num_experts,), (load.shape, num_experts)
    assert np.isfinite(load).all(), load
    assert (load >= 0).all(), load
    _, exponent = math.frexp(math.fsum(load))
    exact: FloatArray = np.rint(np.ldexp(load, 50 - exponent))
    return exact


def _settled(rank_of_expert: IntArray, current: ExpertPlacement) -> ExpertPlacement:
    """Slots for experts on new ranks: the old number where it became free there, else the lowest that did."""
    moved = np.flatnonzero(rank_of_expert != current.rank_of_expert).tolist()
    if not moved:
        return current
    slots, homes = current.slot_of_expert.tolist(), current.rank_of_expert.tolist()
    free: dict[int, list[int]] = {}
    for expert in moved:
        free.setdefault(homes[expert], []).append(slots[expert])
    for expert in sorted(moved, key=lambda expert: slots[expert] not in free[int(rank_of_expert[expert])]):
        here = free[int(rank_of_expert[expert])]
        slots[expert] = slots[expert] if slots[expert] in here else min(here)
        here.remove(slots[expert])
    return ExpertPlacement(rank_of_expert, np.array(slots))


def _round_robin(load: FloatArray, num_ranks: int) -> IntArray:
    ranks = np.empty(len(load), dtype=np.int64)
    ranks[np.argsort(load, kind="stable")] = np.arange(len(load)) % num_ranks
    return ranks


def _longest_first(load: FloatArray, num_ranks: int) -> IntArray:
    """Heaviest expert first, each to the least loaded rank that has room."""
    room = [len(load) // num_ranks] * num_ranks
    ranks = np.empty(len(load), dtype=np.int64)
    open_ranks = [(0.0, rank) for rank in range(num_ranks)]
    for expert in np.argsort(-load, kind="stable").tolist():
        has, rank = open_ranks[0]
        ranks[expert] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heapreplace(open_ranks, (has + float(load[expert]), rank))
        else:
            heapq.heappop(open_ranks)
    return ranks


def _from_scratch(load: FloatArray, num_ranks: int, *, swap: bool) -> IntArray:
    ranks = _longest_first(load, num_ranks)
    free = np.zeros((num_ranks, num_ranks))
    return _swapped(load, ranks, free, Thresholds(_GOOD_ENOUGH, price=0.0)) if swap else ranks


def _renamed(group_of_expert: IntArray, home_of_expert: IntArray, num_groups: int) -> IntArray:
    """The same groups under the names that leave most experts at home; a home of -1 is none of them."""
    from scipy.optimize import linear_sum_assignment

    settled = home_of_expert >= 0
    at_home = np.zeros((num_groups, num_groups), dtype=np.int64)
    np.add.at(at_home, (group_of_expert[settled], home_of_expert[settled]), 1)
    _, name_of_group = linear_sum_assignment(at_home, maximize=True)
    renamed: IntArray = name_of_group.astype(np.int64)[group_of_expert]
    return renamed


def _hierarchical(load: FloatArray, now: IntArray, nodes: IntArray) -> IntArray:
    """Even nodes first, then even ranks inside each. Nodes of unequal size are taken as one."""
    names, node_of_rank, sizes = np.unique(nodes, return_inverse=True, return_counts=True)
    if len(set(sizes.tolist())) > 1:
        names, node_of_rank = np.zeros(1, dtype=np.int64), np.zeros_like(nodes)
    num_nodes = len(names)
    node_of_expert = _renamed(_from_scratch(load, num_nodes, swap=True), node_of_rank[now], num_nodes)
    ranks = np.empty_like(now)
    for node in range(num_nodes):
        members = np.flatnonzero(node_of_rank == node)
        experts = np.flatnonzero(node_of_expert == node)
        homes = np.where(node_of_rank[now[experts]] == node, np.searchsorted(members, now[experts]), -1)
        groups = _from_scratch(load[experts], len(members), swap=True)
        ranks[experts] = members[_renamed(groups, homes, len(members))]
    return ranks


def _moving_prices(nodes: IntArray, cross_node_penalty: float) -> FloatArray:
    """[P, P]: what it costs an expert to go from one rank to another; 1 inside a node."""
    prices: FloatArray = np.where(nodes[:, None] == nodes, 1.0, cross_node_penalty)
    np.fill_diagonal(prices, 0.0)
    return prices


def _swapped(load: FloatArray, ranks: IntArray, prices: FloatArray, thresholds: Thresholds) -> IntArray:
    """Until another pass changes nothing: what is settled stays so. Every pass lowers the sorted loads of the ranks."""
    while True:
        found = _pass(load, ranks, prices, thresholds)
        if np.array_equal(found, ranks):
            return ranks
        ranks = found


def _pass(load: FloatArray, ranks: IntArray, prices: FloatArray, thresholds: Thresholds) -> IntArray:
    """Relieves the busiest rank; if it has an expert that lifts any rank above the mean, sets it aside for the rest."""
    ranks, enough = ranks.copy(), 0.0
    is_open = np.ones(len(prices), dtype=np.bool_)
    while True:
        open_ranks, members = np.flatnonzero(is_open), np.flatnonzero(is_open[ranks])
        places = (is_open.cumsum() - 1)[ranks[members]]
        places = _relieved(load[members], places, prices[is_open][:, is_open], thresholds, enough)
        ranks[members] = open_ranks[places]
        totals = rank_loads(load[members], places, len(open_ranks))
        busiest = int(totals.argmax())
        enough = max(enough, _CLEAR_OF_PACE * float(totals[busiest]))
        hottest = load[members[places == busiest]].max()
        lightest = np.sort(load[members])[: len(members) // len(open_ranks) - 1].sum()
        if len(open_ranks) <= 2 or hottest + lightest <= totals.mean() or totals[busiest] < enough:
            return ranks
        is_open[open_ranks[busiest]] = False


def _relieved(load: FloatArray, start: IntArray, prices: FloatArray, thresholds: Thresholds, enough: float) -> IntArray:
    """Swaps of the busiest rank, one after the other; of all states on the way, the one that gains most over its cost.

    Looking at the whole way matters: several ranks may share the maximum, and the first swap then gains nothing.
    Below ``enough``, or the thresholds' target, or the lower bound, there is nothing more to gain.
    """
    num_ranks = len(prices)
    wanted = (1 + thresholds.target) * load.sum() / num_ranks
    target = math.floor(max(wanted, lower_bound(load, num_ranks), enough))
    prices = np.rint(thresholds.price * load.mean() * prices)
    experts = start.argsort(kind="stable").reshape(num_ranks, -1)  # [P, E/P]
    weights = load[experts]
    totals = weights.sum(1)
    best, most, last = experts.copy(), 0.0, 0
    top, cost = float(totals.max()), 0.0
    tabu: IntArray | None = None  # [E, P], once a detour has begun: until when an expert may not go back there
    for step in itertools.count():
        busiest = int(totals.argmax())
        gain = top - max(float(totals[busiest]), target) - cost
        if gain > most:
            best, most, last = experts.copy(), gain, step
        if top - target - cost <= most or step - last > _MAX_DETOUR:
            break
        swap = _best_swap(weights, totals, busiest, prices[busiest]) if tabu is None else None
        if swap is None:
            tabu = np.zeros((len(load), num_ranks), dtype=np.int64) if tabu is None else tabu
            barred_out, barred_in = tabu[experts[busiest]] > step, tabu[experts, busiest] > step
            swap = _least_bad_swap(weights, totals, busiest, prices[busiest], barred_out, barred_in)
        if swap is None:
            break
        mine, theirs = (busiest, swap.slot), (swap.other_rank, swap.other_slot)
        for here, there in ((mine, theirs), (theirs, mine)):
            expert, home = experts[here], start[experts[here]]
            cost += float(prices[home, there[0]] - prices[home, here[0]])
            if tabu is not None:
                tabu[expert, here[0]] = step + 1 + _TABU_STEPS
        shift = weights[mine] - weights[theirs]
        totals[busiest] -= shift
        totals[swap.other_rank] += shift
        for array in (experts, weights):
            array[mine], array[theirs] = array[theirs], array[mine]
    ranks = np.empty_like(start)
    ranks[best] = np.arange(num_ranks)[:, None]
    return ranks


class _Swap(NamedTuple):
    """The busiest rank's expert in ``slot`` and another rank's change places."""

    slot: int
    other_rank: int
    other_slot: int


def _best_swap(weights: FloatArray, totals: FloatArray, busiest: int, prices: FloatArray) -> _Swap | None:
    """The swap that leaves the two ranks lowest, price included; None if none leaves them lower than the busiest is.

    The two become even if the experts differ by half of what the ranks differ by. Of the busiest rank's experts, the
    one nearest to that is the partner of each expert elsewhere. Shapes: ``weights`` [P, E/P], ``prices`` [P].
    """
    order = weights[busiest].argsort(kind="stable")
    ours = weights[busiest, order]
    half = (totals[busiest] - totals) / 2
    ideal = weights + half[:, None]
    nearest = ((ours[1:] + ours[:-1]) / 2).searchsorted(ideal)
    gap = np.abs(ours[nearest] - ideal)
    key = np.where(gap < half[:, None], gap + (totals + half + 2 * prices)[:, None], np.inf)
    rank, slot = divmod(int(key.argmin()), weights.shape[1])
    return _Swap(int(order[nearest[rank, slot]]), rank, slot) if key[rank, slot] < np.inf else None


def _least_bad_swap(
    weights: FloatArray,
    totals: FloatArray,
    busiest: int,
    prices: FloatArray,
    barred_out: BoolArray,
    barred_in: BoolArray,
) -> _Swap | None:
    """As above, but the busiest rank may hand on its place, and what is barred stays: ``barred_out`` [E/P, P] tells
    where its experts may not go, ``barred_in`` [P, E/P] which may not come."""
    shift = weights[busiest][:, None, None] - weights
    peak = np.maximum(totals[busiest] - shift, totals[:, None] + shift)
    allowed = (shift > 0) & ~barred_out[:, :, None] & ~barred_in
    allowed[:, busiest] = False
    key = np.where(allowed, peak + 2 * prices[:, None], np.inf)
    slot, rank, other = np.unravel_index(int(key.argmin()), key.shape)
    return _Swap(int(slot), int(rank), int(other)) if key[slot, rank, other] < np.inf else None
