"""launch/savings.py: the loss and the gradients stay what they are, with less kept for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import build_model, model_config
from savings import LossHead, Savings, asked_by_plan
from torch.nn.functional import cross_entropy

from ds_hybrid.errors import ConfigError

NUM_TOKENS = 30
LARGE = 4096  # a vocabulary whose logits are most of what is kept


def trained(savings: Savings | None, model_name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Losses [2, L], gradients of their mean, and bytes that autograd kept; ``None``: a plain model and loss."""
    config = model_config(model_name, seq_len=NUM_TOKENS)
    config.vocab_size = LARGE
    model = build_model(config, seed=0).train()
    tokens = torch.randint(0, LARGE, (2, NUM_TOKENS + 1), generator=torch.Generator().manual_seed(1))
    if savings is not None:
        savings.apply(model)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if savings is None:
            logits = model(input_ids=tokens[:, :-1]).logits
            losses = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(2, -1)
        else:
            with model.get_output_embeddings().knowing(tokens[:, 1:]):
                losses = model(input_ids=tokens[:, :-1]).logits
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    losses.mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return losses.detach(), gradients, sum(size for place, size in kept.items() if place not in weights)


@pytest.mark.parametrize("model_name", ["tiny_qwen3_moe", "tiny_mixtral", "tiny_deepseek_v3"])
@pytest.mark.parametrize(
    "savings", [Savings(), Savings(True), Savings(False, 7), Savings(True, 60), Savings(True, 100)]
)
def test_losses_and_gradients_are_those_of_the_plain_model(savings: Savings, model_name: str) -> None:
    expected_losses, expected, kept_plain = trained(None, model_name)
    losses, gradients, kept = trained(savings, model_name)
    torch.testing.assert_close(losses, expected_losses)
    assert gradients.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], msg=name)
    # In chunks the float32 log-softmax of every token is not kept; with checkpoints only inputs of layers are.
    logits = 2 * NUM_TOKENS * LARGE * 4
    of_layers = kept - (0 if savings.loss_chunk else logits)
    least, most = (0.02, 0.5) if savings.checkpoints else (0.97, 1.03)
    assert least < of_layers / (kept_plain - logits) < most


def test_the_head_gives_logits_where_no_targets_are_known() -> None:
    projection = torch.nn.Linear(8, 16)
    head = LossHead(projection, chunk=2)
    hidden = torch.randn(2, 3, 8)
    assert torch.equal(head(hidden), projection(hidden))
    assert head.state_dict().keys() == projection.state_dict().keys()
    with head.knowing(torch.zeros(2, 3, dtype=torch.int64)):
        assert head(hidden).shape == (2, 3)
    assert torch.equal(head(hidden), projection(hidden))


def test_what_a_plan_asks_for_and_the_command_line_changes() -> None:
    asked = asked_by_plan(with_needs({"activation_checkpoints": True, "loss_chunk": 2048}), "mine.json")
    assert asked == Savings(True, 2048)
    assert asked.with_changes(checkpoints=None, loss_chunk=None) == asked
    assert asked.with_changes(checkpoints=False, loss_chunk=0) == Savings()
    for document in ({}, {"ds_hybrid": {}}, {"ds_hybrid": {"plan": None}}, {"ds_hybrid": {"plan": {"inputs": {}}}}):
        assert asked_by_plan(document, "mine.json") == Savings()


@pytest.mark.parametrize("needs", [[], {"activation_checkpoints": "yes"}, {"loss_chunk": -1}, {"loss_chunk": True}])
def test_what_no_plan_asks_for_is_refused(needs: Any) -> None:
    with pytest.raises(ConfigError, match=r"^ds_hybrid\.plan\.needs = .* \(mine\.json\): .*plan --write\.$"):
        asked_by_plan(with_needs(needs), "mine.json")


def with_needs(needs: Any) -> dict[str, Any]:
    return {"ds_hybrid": {"plan": {"needs": needs}}}
