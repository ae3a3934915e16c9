"""The correction bias, on loads that can be worked out by hand."""

from __future__ import annotations

import torch
from torch import nn

from ds_hybrid.moe.correction_bias import update_correction_biases
from ds_hybrid.moe.router import Router, RouterOptions


def test_bias_moves_against_the_load_and_the_load_starts_anew() -> None:
    router = Router(4, 4, RouterOptions(top_k=1, bias_update_rate=0.01))
    assert router.load_since_update is not None
    assert router.correction_bias is not None
    router.load_since_update += torch.tensor([10, 2, 4, 0])
    update_correction_biases([Router(4, 4, RouterOptions(top_k=1)), router], apply=True)
    torch.testing.assert_close(router.correction_bias, torch.tensor([-0.01, 0.01, 0.0, 0.01]))
    assert router.load_since_update.tolist() == [0, 0, 0, 0]

    router.load_since_update += torch.tensor([10, 2, 4, 0])
    update_correction_biases([router], apply=False)
    torch.testing.assert_close(router.correction_bias, torch.tensor([-0.01, 0.01, 0.0, 0.01]))
    assert router.load_since_update.tolist() == [0, 0, 0, 0]


def test_bias_evens_the_load_out() -> None:
    """B2: a router that sends nearly every token to one expert is even after 200 steps, its weights unchanged."""
    torch.manual_seed(0)
    router = Router(8, 4, RouterOptions(top_k=1, score="sigmoid", bias_update_rate=0.002))
    nn.init.normal_(router.wg.weight, std=0.1)
    tokens = torch.randn(512, 8)
    tokens += 4 * router.wg.weight[2].detach() / router.wg.weight[2].norm()
    shares = []
    for _ in range(200):
        shares.append(router(tokens).num_routed / 512)
        update_correction_biases([router], apply=True)
    assert float(shares[0].max()) > 0.5
    assert float(shares[-1].max()) < 0.27
    # The bias chooses; it does not weigh.
    routed = router(tokens)
    expected = torch.sigmoid(router.wg(tokens)).gather(1, routed.routing.topk_ids)
    torch.testing.assert_close(routed.routing.topk_weights, expected)


def test_bias_is_saved_and_is_float32_again_after_a_cast() -> None:
    router = Router(4, 4, RouterOptions(top_k=1, bias_update_rate=0.01)).bfloat16()
    router.restore_bias_dtype()
    assert router.state_dict()["correction_bias"].dtype == torch.float32
    assert "correction_bias" not in Router(4, 4, RouterOptions(top_k=1)).state_dict()
