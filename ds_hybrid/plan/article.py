"""The article's rule for a layout beside the planner's. Pure.

The rule, as printed: the first TP size of 1, 2, 4, 8, 16 with L <= 16384 / sqrt(TP), else 16. The bound falls as TP
grows, so what TP 1 does not meet no larger size meets: it can only return 1 or 16. Its text takes plan A for L
up to 16K, and plan B beyond. Plan B as printed (DP 2, TP 2, "8 groups") does not multiply to 16, and is read as DP 8,
TP 2, EP 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from ds_hybrid.dispatch.modes import Mode
from ds_hybrid.plan.search import Estimate

SIZES = (1, 2, 4, 8, 16)
LONGEST_OF_PLAN_A = 16384

Plan = Literal["A", "B"]
_PLANS: dict[Plan, tuple[int, int, Mode]] = {"A": (4, 4, "replicated"), "B": (2, 8, "two_stage")}


@dataclass(frozen=True)
class ArticleChoice:
    """What the article would take: ``formula_tp`` by its formula, ``plan`` by its text."""

    formula_tp: int
    plan: Plan
    tp_size: int
    ep_size: int
    mode: Mode


def formula_tp(seq_len: int) -> int:
    """The rule as printed."""
    return next((size for size in SIZES if seq_len <= LONGEST_OF_PLAN_A / sqrt(size)), SIZES[-1])


def article_choice(seq_len: int) -> ArticleChoice:
    """For sequences of ``seq_len`` tokens."""
    plan: Plan = "A" if seq_len <= LONGEST_OF_PLAN_A else "B"
    return ArticleChoice(formula_tp(seq_len), plan, *_PLANS[plan])


def why_it_differs(article: Estimate, ours: Estimate) -> str:
    """One sentence: the part of the time of a token that differs the most."""
    of_article, of_ours = _seconds_per_token(article), _seconds_per_token(ours)
    part = max(of_article, key=lambda name: of_article[name] - of_ours[name])
    saved = (of_article[part] - of_ours[part]) / sum(of_article.values())
    if saved <= 0.005:
        return "there is little between them."
    words = part.replace("_", " ")
    return f"most of the difference is {words}: {100 * saved:.0f} % of its time for a token. {_cause(part)}".strip()


def _seconds_per_token(estimate: Estimate) -> dict[str, float]:
    tokens = estimate.tokens_per_second * estimate.time.total
    return {name: part * estimate.time.total / tokens for name, part in estimate.shares}


def _cause(part: str) -> str:
    causes = {
        "dense": "Tensor parallelism shards attention alone; its ranks compute all else alike.",
        "memory_bound": "Tensor parallelism shards attention alone; its ranks compute all else alike.",
        "experts": "The busiest rank of a layer sets the pace, and differs more from the mean in larger groups.",
        "dispatch": "More ranks share the experts, so more rows travel.",
        "tensor_parallel": "Sharded attention adds up what its ranks computed, twice a layer.",
        "reduction": "Gradients are added up more often, or over slower links.",
        "gathers": "Weights are gathered more often, or over slower links.",
        "optimizer": "Each rank updates more of the states.",
    }
    return causes.get(part, "")
