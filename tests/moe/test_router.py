"""Choosing experts, on rows that can be checked by eye. The whole router is compared in test_layer.py."""

from __future__ import annotations

import torch

from ds_hybrid.moe.router import Router, RouterOptions, count_pairs, limit_to_groups


def test_groups_are_limited() -> None:
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.6, 0.1]])
    out = -torch.inf
    assert limit_to_groups(scores, 3, 1, best=1).tolist() == torch.tensor([[0.9, 0.0, out, out, out, out]]).tolist()
    assert limit_to_groups(scores, 3, 1, best=2).tolist() == torch.tensor([[out, out, 0.5, 0.5, out, out]]).tolist()
    two = torch.tensor([[0.9, 0.0, 0.5, 0.5, out, out]])
    assert limit_to_groups(scores, 3, 2, best=2).tolist() == two.tolist()


def test_groups_of_one_expert() -> None:
    assert limit_to_groups(torch.tensor([[3.0, 1.0, 2.0]]), 3, 2, best=2).tolist() == [[3.0, -torch.inf, 2.0]]


def test_negative_scores_with_bias_never_leave_the_chosen_groups() -> None:
    """A bias may push every score below 0; experts outside the groups must not win over them."""
    router = Router(2, 8, RouterOptions(top_k=2, score="sigmoid", num_groups=4, topk_groups=1, bias_update_rate=0.1))
    assert router.correction_bias is not None
    router.correction_bias -= 5.0
    ids = router(torch.randn(50, 2)).routing.topk_ids
    assert torch.equal(ids[:, 0] // 2, ids[:, 1] // 2)


def test_pairs_are_counted() -> None:
    ids, kept = torch.tensor([[0, 2], [2, 1]]), torch.tensor([[True, False], [True, True]])
    assert count_pairs(ids, None, 4).tolist() == [1, 1, 2, 0]
    assert count_pairs(ids, kept, 4).tolist() == [1, 1, 1, 0]


def test_gumbel_noise_draws_from_the_scores() -> None:
    torch.manual_seed(0)
    router = Router(1, 2, RouterOptions(top_k=1, noise="gumbel"))
    with torch.no_grad():
        router.wg.weight.copy_(torch.tensor([[0.0], [1.0]]))
    share = router(torch.ones(20000, 1)).num_routed[1] / 20000
    assert abs(float(share) - float(torch.tensor(1.0).sigmoid())) < 0.02
