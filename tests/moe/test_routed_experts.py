"""What is handed to the dispatcher when not everything is kept, and how it comes back."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hybrid.dispatch.collectives import LoneRank
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.routing import Routing
from ds_hybrid.moe.routed_experts import pack_kept
from ds_hybrid.moe.router import RouterOutput

TOKENS = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
IDS = torch.tensor([[0, 1], [2, 0], [1, 2]])
WEIGHTS = torch.tensor([[0.5, 0.25], [1.0, 2.0], [4.0, 8.0]], dtype=torch.float64)


def decision(kept: Tensor | None) -> RouterOutput:
    counts = torch.zeros(3, dtype=torch.int64)
    return RouterOutput(Routing(IDS, WEIGHTS, 3), kept, torch.zeros(()), counts, counts)


def test_everything_is_handed_over_as_it_is() -> None:
    cargo = pack_kept(TOKENS, decision(None), by_pair=True)
    assert cargo.tokens is TOKENS
    assert cargo.unpack(TOKENS) is TOKENS


def test_masked_tokens_stay_behind() -> None:
    kept = torch.tensor([[True, True], [False, False], [True, True]])
    cargo = pack_kept(TOKENS, decision(kept), by_pair=False)
    assert cargo.tokens.tolist() == [[1.0], [3.0]]
    assert cargo.routing.topk_ids.tolist() == [[0, 1], [1, 2]]
    assert cargo.routing.topk_weights.tolist() == [[0.5, 0.25], [4.0, 8.0]]
    assert cargo.unpack(torch.tensor([[7.0], [9.0]])).tolist() == [[7.0], [0.0], [9.0]]


def test_a_token_that_keeps_one_of_two_experts_travels_as_one_pair() -> None:
    kept = torch.tensor([[True, True], [False, True], [False, False]])
    cargo = pack_kept(TOKENS, decision(kept), by_pair=True)
    assert cargo.tokens.tolist() == [[1.0], [1.0], [2.0]]
    assert cargo.routing.topk_ids.tolist() == [[0], [1], [0]]
    assert cargo.routing.topk_weights.tolist() == [[1.0], [1.0], [1.0]]
    # Each pair's result is weighed here, once: 0.5 x 10 + 0.25 x 100, and 2 x 1000.
    assert cargo.unpack(torch.tensor([[10.0], [100.0], [1000.0]])).tolist() == [[30.0], [2000.0], [0.0]]


def test_a_lone_rank_exchanges_nothing() -> None:
    group = LoneRank(Meter())
    assert torch.equal(group.all_to_all(TOKENS, [3], [3]).wait(), TOKENS)
    assert torch.equal(group.all_gather(TOKENS).wait(), TOKENS)
    assert torch.equal(group.reduce_scatter(TOKENS).wait(), TOKENS)
    assert group.all_gather_metadata(IDS).shape == (1, 3, 2)
    sent = group.meter.take()
    assert sent.payload == sent.metadata == 0
