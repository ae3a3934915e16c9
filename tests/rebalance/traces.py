"""The traces of tests/data, and the best that any placement could do with them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, vstack

from ds_hybrid.rebalance.algorithms import lower_bound
from ds_hybrid.rebalance.trace import Trace, read_trace

FOLDER = Path(__file__).parents[1] / "data" / "traces"


@cache
def trace(name: str) -> Trace:
    return read_trace(FOLDER / f"{name}.npz")


def window(name: str, begin: int, length: int, layer: int) -> npt.NDArray[np.float64]:
    """[E]: the mean counts of ``length`` steps from ``begin`` on."""
    mean: npt.NDArray[np.float64] = trace(name).counts[begin : begin + length, layer].mean(0)
    return mean


def proven_bound(load: npt.NDArray[np.float64], num_ranks: int, *, seconds: float) -> float:
    """What no placement can go below, by mixed integer programming: the optimum itself if time suffices.

    Variables: x[e, r], whether expert e is on rank r, and the load of the busiest rank. The heaviest expert may only be
    on rank 0, the next on 0 or 1, and so on: ranks have no names.
    """
    num_experts = len(load)
    scaled = load * num_ranks / load.sum()
    bound = lower_bound(scaled, num_ranks)
    each, rank = np.divmod(np.arange(num_experts * num_ranks), num_ranks)
    columns = np.arange(num_experts * num_ranks)
    width = len(columns) + 1
    once = coo_array((np.ones(len(each)), (each, columns)), (num_experts, width))
    slots = coo_array((np.ones(len(rank)), (rank, columns)), (num_ranks, width))
    loads = coo_array(
        (
            np.concatenate([scaled[each], -np.ones(num_ranks)]),
            (np.concatenate([rank, np.arange(num_ranks)]), np.append(columns, [width - 1] * num_ranks)),
        ),
        (num_ranks, width),
    )
    full = np.full(num_ranks, num_experts / num_ranks)
    lower = np.concatenate([np.ones(num_experts), full, np.full(num_ranks, -np.inf)])
    upper = np.concatenate([np.ones(num_experts), full, np.zeros(num_ranks)])
    highest = np.ones((num_experts, num_ranks))
    for place, expert in enumerate(np.argsort(-scaled, kind="stable")[: num_ranks - 1]):
        highest[expert, place + 1 :] = 0
    found = milp(
        np.append(np.zeros(len(columns)), 1.0),
        integrality=np.append(np.ones(len(columns)), 0),
        bounds=Bounds(np.append(np.zeros(len(columns)), bound), np.append(highest.ravel(), float(num_ranks))),
        constraints=LinearConstraint(vstack([once, slots, loads]).tocsr(), lower, upper),
        options={"time_limit": seconds, "mip_rel_gap": 1e-3},
    )
    return max(bound, found.mip_dual_bound or 0.0) * float(load.sum()) / num_ranks
