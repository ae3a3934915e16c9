"""How experts are built: different ones, from (source, seed, expert id) alone, keeping the source's law."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ds_hybrid
from ds_hybrid.errors import ConfigError
from ds_hybrid.moe.local_experts import LocalExperts, build_expert


class Scaled(nn.Module):
    """An orthogonal matrix, a norm's ones, zeros, and a frozen table."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(8, 8)))
        self.scale = nn.Parameter(torch.ones(8))
        self.bias = nn.Parameter(torch.zeros(8))
        self.table = nn.Parameter(torch.arange(8.0), requires_grad=False)


def test_copies_differ_and_keep_the_law() -> None:
    source = Scaled()
    first, second = (build_expert(source, seed=1, expert_id=i) for i in (0, 1))
    assert not torch.equal(first.weight, second.weight)
    assert not torch.equal(first.weight, source.weight)
    for expert in (first, second):
        torch.testing.assert_close(expert.weight @ expert.weight.T, torch.eye(8), rtol=0, atol=1e-5)
        for name in ("scale", "bias", "table"):
            assert torch.equal(getattr(expert, name), getattr(source, name))


@pytest.mark.parametrize("source", [nn.Linear(4, 4), lambda: nn.Linear(4, 4)], ids=["module", "factory"])
def test_same_source_seed_and_id_give_the_same_expert(source: nn.Module) -> None:
    def weight(seed: int, expert_id: int) -> Tensor:
        torch.rand(3)
        return build_expert(source, seed=seed, expert_id=expert_id).weight

    assert torch.equal(weight(5, 2), weight(5, 2))
    assert not torch.equal(weight(5, 2), weight(6, 2))
    assert not torch.equal(weight(5, 2), weight(5, 3))


def test_a_layer_can_be_built_on_the_meta_device() -> None:
    with torch.device("meta"):
        layer = ds_hybrid.MoE(4, nn.Linear(4, 4), 2, bias_update_rate=0.1, use_residual=True)
    assert all(parameter.is_meta for parameter in layer.parameters())


def test_a_factory_leaves_the_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    build_expert(lambda: nn.Linear(4, 4), seed=1, expert_id=0)
    assert torch.equal(torch.rand(2), expected)


def test_a_factory_must_return_a_module() -> None:
    with pytest.raises(ConfigError, match="the factory returned a Tensor, must return a torch"):
        build_expert(lambda: torch.zeros(2), seed=0, expert_id=0)  # type: ignore[arg-type, return-value]


def test_rows_go_through_the_expert_of_their_slot() -> None:
    experts = LocalExperts([nn.Linear(4, 4) for _ in range(3)], "ep_size_1")
    rows = torch.randn(5, 4)
    output = experts(rows, torch.tensor([2, 0, 3]))
    modules = experts.deepspeed_experts
    torch.testing.assert_close(output, torch.cat([modules[0](rows[:2]), modules[2](rows[2:])]))
    output.sum().backward()
    assert torch.equal(modules[1].weight.grad, torch.zeros(4, 4))  # not None: its replicas wait for it
