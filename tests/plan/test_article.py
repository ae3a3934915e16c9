"""The article's rule as printed, its plans, and the sentence that compares them with ours."""

from __future__ import annotations

import pytest

from ds_hybrid.plan.article import article_choice, formula_tp, why_it_differs
from ds_hybrid.plan.candidate import Workload
from ds_hybrid.plan.machine import read_machine
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.routing import read_routing
from ds_hybrid.plan.search import Request, best_of_sizes, search

H200 = read_machine("h200x8_ib400")


@pytest.mark.parametrize("seq_len", [1, 4096, 8192, 11585, 16384, 16385, 32768, 10**6])
def test_the_formula_gives_1_or_16(seq_len: int) -> None:
    assert formula_tp(seq_len) == (1 if seq_len <= 16384 else 16)


def test_the_text_takes_plan_a_up_to_16k() -> None:
    short, long = article_choice(16384), article_choice(16385)
    assert (short.plan, short.tp_size, short.ep_size, short.mode) == ("A", 4, 4, "replicated")
    assert (long.plan, long.tp_size, long.ep_size, long.mode) == ("B", 2, 8, "two_stage")


def test_why_it_differs_names_the_part_that_costs_the_most() -> None:
    model = read_model("qwen3_30b_a3b")
    request = Request(model, Workload(4096), H200, H200.cluster(16), read_routing("uniform", model))
    ours, article = search(request).fitting[0], best_of_sizes(request, 4, 4, "replicated")
    assert not isinstance(article, str)
    per_token = [
        {name: share * e.time.total / (e.tokens_per_second * e.time.total) for name, share in e.shares}
        for e in (article, ours)
    ]
    part = max(per_token[0], key=lambda name: per_token[0][name] - per_token[1][name])
    assert f"most of the difference is {part.replace('_', ' ')}" in why_it_differs(article, ours)
    assert why_it_differs(ours, ours) == "there is little between them."
