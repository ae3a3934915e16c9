"""``ds_hybrid.MoE`` in one process: against a layer written token by token, and against DeepSpeed's own."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE as DeepSpeedMoE
from torch import Tensor, nn

import ds_hybrid
from ds_hybrid import ConfigError, DispatchError
from tests.moe.reference import Reference, dense_moe

HIDDEN, EXPERTS = 8, 4
CHANGED_DEFAULTS = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 12), nn.Tanh(), nn.Linear(12, HIDDEN))


def make_layer(k: int = 1, *, num_experts: int = EXPERTS, seed: int = 0, **options: Any) -> ds_hybrid.MoE:
    """In float64, with random gate weights large enough that scores differ."""
    torch.manual_seed(seed)
    layer = ds_hybrid.MoE(HIDDEN, mlp, num_experts, k=k, **options).double()
    nn.init.normal_(layer.deepspeed_moe.gate.wg.weight)
    return layer


def make_tokens(num_tokens: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64)


def reference_of(layer: ds_hybrid.MoE, tokens: Tensor, used: list[bool] | None = None) -> Reference:
    gate = layer.deepspeed_moe.gate
    experts = list(layer.deepspeed_moe.experts.deepspeed_experts)
    return dense_moe(tokens, gate.wg.weight, experts, gate.options, used, gate.correction_bias, layer.training)


OPTIONS: dict[str, dict[str, Any]] = {
    "one expert": {"k": 1},
    "two experts": {"k": 2},
    "three experts": {"k": 3},
    "all experts": {"k": 4},
    "weights as they are": {"k": 2, "normalize_weights": False, "weight_scale": 2.5},
    "sigmoid": {"k": 2, "score": "sigmoid"},
    "groups by their best": {"k": 3, "num_experts": 12, "num_groups": 4, "topk_groups": 2},
    "groups by their best two": {"k": 3, "num_experts": 12, "num_groups": 4, "topk_groups": 2, "score": "sigmoid"},
    "z-loss": {"k": 2, "z_loss_weight": 0.25},
    "bias": {"k": 2, "score": "sigmoid", "bias_update_rate": 0.01},
    "capacity by probability": {"k": 2, "drop_tokens": True, "capacity_factor": 0.6, "min_capacity": 0},
    "capacity by position": {
        "k": 2,
        "drop_tokens": True,
        "capacity_factor": 0.6,
        "min_capacity": 1,
        "drop_policy": "position",
    },
}


@pytest.mark.parametrize("used", [None, [True, False] * 5 + [True]], ids=["all", "masked"])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_layer_written_token_by_token(name: str, used: list[bool] | None) -> None:
    layer = make_layer(**OPTIONS[name])
    if layer.deepspeed_moe.gate.correction_bias is not None:
        nn.init.normal_(layer.deepspeed_moe.gate.correction_bias)
    tokens, upstream = make_tokens(11).requires_grad_(), make_tokens(11, seed=2)
    expected = reference_of(layer, tokens, used)
    mask = None if used is None else torch.tensor(used)
    result = layer.run(tokens, mask)

    torch.testing.assert_close(result.output, expected.output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.l_aux, expected.l_aux, rtol=1e-12, atol=1e-12)
    assert result.num_routed.tolist() == expected.num_routed
    assert result.num_processed.tolist() == expected.num_processed
    parameters = [tokens, *layer.parameters()]
    actual = torch.autograd.grad((result.output * upstream).sum() + result.l_aux, parameters)
    wanted = torch.autograd.grad(
        (expected.output * upstream).sum() + expected.l_aux, parameters, allow_unused=True, materialize_grads=True
    )
    for got, want in zip(actual, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("k", "drop_tokens"), [(1, False), (2, False), (3, False), (3, True)])
def test_equals_deepspeeds(k: int, drop_tokens: bool) -> None:
    """In fp32. With k = 2 its auxiliary loss counts first choices only; with k < 3 it does not drop by probability."""
    shared: dict[str, Any] = {"k": k, "drop_tokens": drop_tokens, "capacity_factor": 0.7, "min_capacity": 0}
    torch.manual_seed(0)
    theirs = DeepSpeedMoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), EXPERTS, top2_2nd_expert_sampling=False, **shared)
    for expert in theirs.deepspeed_moe.experts.deepspeed_experts:
        expert.reset_parameters()
    ours = ds_hybrid.MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), EXPERTS, **shared)
    assert isinstance(ours, DeepSpeedMoE)
    ours.load_state_dict(theirs.state_dict())
    tokens = make_tokens(24).float().view(2, 12, HIDDEN)
    output, l_aux, exp_counts = ours(tokens)
    their_output, their_l_aux, their_counts = theirs(tokens)
    assert exp_counts.tolist() == their_counts.tolist()
    torch.testing.assert_close(output, their_output)
    if k != 2:
        torch.testing.assert_close(l_aux, their_l_aux)


def test_state_dict_is_deepspeeds() -> None:
    theirs = DeepSpeedMoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), EXPERTS, use_residual=True)
    ours = ds_hybrid.MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), EXPERTS, use_residual=True)
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_signature_is_deepspeeds_and_more_by_keyword() -> None:
    theirs = inspect.signature(DeepSpeedMoE.__init__).parameters
    ours = inspect.signature(ds_hybrid.MoE.__init__).parameters
    assert [name for name in ours if ours[name].kind is not inspect.Parameter.KEYWORD_ONLY] == list(theirs)
    different = {name: ours[name].default for name in theirs if ours[name].default != theirs[name].default}
    assert different == CHANGED_DEFAULTS


def test_second_expert_is_sampled_in_training_only() -> None:
    """R1: four evaluations of one batch agree bit for bit, and with those of a layer that does not sample."""
    plain, sampling = make_layer(2), make_layer(2, top2_2nd_expert_sampling=True)
    tokens = make_tokens(12)
    assert any(not torch.equal(sampling(tokens)[0], plain(tokens)[0]) for _ in range(4))
    first_choices = plain.deepspeed_moe.gate(tokens).routing.topk_ids[:, 0]
    sampled = sampling.deepspeed_moe.gate(tokens).routing.topk_ids
    assert torch.equal(sampled[:, 0], first_choices)
    assert (sampled[:, 0] != sampled[:, 1]).all()
    for layer in (plain, sampling):
        layer.eval()
    expected = plain(tokens)
    for _ in range(4):
        for got, want in zip(sampling(tokens), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    "options",
    [{"noisy_gate_policy": "Jitter"}, {"noisy_gate_policy": "RSample"}, {"drop_tokens": True, "use_rts": True}],
)
def test_noise_acts_in_training_only(options: dict[str, Any]) -> None:
    layer, tokens = make_layer(1, capacity_factor=0.5, eval_capacity_factor=0.5, **options), make_tokens(64)
    assert any(not torch.equal(layer(tokens)[0], layer(tokens)[0]) for _ in range(4))
    layer.eval()
    assert torch.equal(layer(tokens)[0], layer(tokens)[0])


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_padding_is_not_routed(k: int, dtype: torch.dtype) -> None:
    """R2, R3: 12 tokens of which 6 are padding give what the 6 give without it, for every dtype of the mask."""
    layer, tokens = make_layer(k), make_tokens(12)
    mask = torch.tensor([1] * 6 + [0] * 6, dtype=dtype)
    result, alone = layer.run(tokens, mask), layer.run(tokens[:6])
    assert int(result.num_routed.sum()) == 6 * k
    assert result.num_routed.tolist() == alone.num_routed.tolist()
    assert torch.equal(result.output[6:], torch.zeros(6, HIDDEN))
    torch.testing.assert_close(result.output[:6], alone.output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.l_aux, alone.l_aux)


def test_mask_of_any_shape_and_residual() -> None:
    layer, tokens = make_layer(2, use_residual=True), make_tokens(12).view(3, 4, HIDDEN)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    output = layer(tokens, mask)[0]
    routed = layer.deepspeed_moe(tokens.view(-1, HIDDEN)).output.view_as(tokens)
    shares = layer.coefficient(tokens).softmax(-1)
    expected = routed * shares[..., :1] + layer.mlp(tokens) * shares[..., 1:]
    torch.testing.assert_close(output, expected * mask[..., None])


def test_routed_and_processed_are_two_counts() -> None:
    """R4: 16 equal tokens, one expert each, half the even share: 16 routed, 2 worked on."""
    layer = make_layer(1, drop_tokens=True, capacity_factor=0.5, min_capacity=0)
    tokens = make_tokens(1).expand(16, HIDDEN)
    result = layer.run(tokens)
    assert sorted(result.num_routed.tolist()) == [0, 0, 0, 16]
    assert sorted(result.num_processed.tolist()) == [0, 0, 0, 2]
    assert torch.equal(layer(tokens)[2], result.num_routed)
    assert int((result.output != 0).any(1).sum()) == 2


def test_experts_compute_no_more_rows_than_were_routed() -> None:
    """R5: 64 experts, 2 of them for each of 1024 equal tokens: 2048 rows, where DeepSpeed pads to 65536."""
    rows: list[int] = []
    layer = make_layer(2, num_experts=64)
    for expert in layer.deepspeed_moe.experts.deepspeed_experts:
        expert.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    layer(make_tokens(1).expand(1024, HIDDEN))
    assert sum(rows) == 2048
    assert sorted(rows)[-3:] == [0, 1024, 1024]


def test_experts_start_different() -> None:
    """R6; the same for a module, whose copies are shuffled, and for a factory."""
    for expert in (nn.Linear(HIDDEN, HIDDEN), lambda: nn.Linear(HIDDEN, HIDDEN)):
        layer = ds_hybrid.MoE(HIDDEN, expert, EXPERTS, seed=3)
        weights = [e.weight for e in layer.deepspeed_moe.experts.deepspeed_experts]
        assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_no_tokens() -> None:
    """U3 on one rank: output (0, 8), a finite auxiliary loss of 0, gradients of 0."""
    layer = make_layer(2, z_loss_weight=0.1)
    tokens = torch.zeros(0, HIDDEN, dtype=torch.float64, requires_grad=True)
    output, l_aux, exp_counts = layer(tokens)
    (output.sum() + l_aux).backward()
    assert output.shape == (0, HIDDEN)
    assert l_aux.item() == 0.0
    assert exp_counts.tolist() == [0] * EXPERTS
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def test_everything_masked_is_no_tokens() -> None:
    layer, tokens = make_layer(2), make_tokens(5).requires_grad_()
    output, l_aux, _ = layer(tokens, torch.zeros(5))
    (output.sum() + l_aux).backward()
    assert not output.any()
    assert l_aux.item() == 0.0
    assert tokens.grad is not None
    assert not tokens.grad.any()


def test_non_contiguous_input_and_tuple_experts() -> None:
    class Pair(nn.Linear):
        def forward(self, rows: Tensor) -> Any:
            return super().forward(rows), None

    layer = ds_hybrid.MoE(HIDDEN, lambda: Pair(HIDDEN, HIDDEN), EXPERTS, k=2)
    tokens = make_tokens(12).float().view(3, 4, HIDDEN).transpose(0, 1)
    assert torch.equal(layer(tokens)[0], layer(tokens.contiguous())[0])


def test_load_counts_training_once_and_evaluation_never() -> None:
    layer, tokens = make_layer(2), make_tokens(12)
    counts = layer(tokens)[2]
    layer.eval()
    layer(tokens)
    assert torch.equal(layer.expert_load, counts)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("options", [{}, {"top2_2nd_expert_sampling": True}, {"drop_tokens": True, "use_rts": True}])
def test_checkpointing_changes_nothing(options: dict[str, Any], use_reentrant: bool) -> None:
    """A1 in one process, ties included: the recomputation routes as the forward did."""
    from torch.utils.checkpoint import checkpoint

    results = []
    for checkpointed in (False, True):
        layer = make_layer(2, bias_update_rate=0.1, **options)
        tokens = torch.cat([make_tokens(1).expand(7, HIDDEN), make_tokens(9)]).requires_grad_()
        torch.manual_seed(5)
        output = checkpoint(layer, tokens, use_reentrant=use_reentrant) if checkpointed else layer(tokens)
        (output[0].square().sum() + output[1]).backward()
        gate = layer.deepspeed_moe.gate
        grads = [tokens.grad, *(p.grad for p in layer.parameters())]
        results.append([*grads, output[0].detach(), layer.expert_load, gate.load_since_update])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def test_bf16_scores_are_float32_and_autocast_leaves_them_alone() -> None:
    layer, tokens = make_layer(2).bfloat16(), make_tokens(9).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routed = layer.deepspeed_moe.gate(tokens)
    assert routed.routing.topk_weights.dtype == torch.float32
    assert routed.loss.dtype == torch.float32
    expected = copy.deepcopy(layer.deepspeed_moe.gate).float()(tokens.float())
    assert torch.equal(routed.routing.topk_weights, expected.routing.topk_weights)
    assert layer(tokens)[0].dtype == torch.bfloat16


def test_mask_of_the_wrong_length() -> None:
    with pytest.raises(DispatchError, match=r"^MoE layer: used_token has shape \[5\], must have one entry for each"):
        make_layer()(make_tokens(6), torch.ones(5))


def test_ranks_are_needed_before_the_first_forward() -> None:
    layer = ds_hybrid.MoE(HIDDEN, mlp, EXPERTS, ep_size=2)
    assert layer.num_local_experts == len(layer.deepspeed_moe.experts.deepspeed_experts) == 2
    with pytest.raises(ConfigError, match=r"^ds_hybrid.MoE\(ep_size=2\) has no expert-parallel group yet\."):
        layer(make_tokens(3).float())


def test_experts_are_marked() -> None:
    layer = ds_hybrid.MoE(HIDDEN, mlp, EXPERTS, ep_size=2, use_residual=True)
    for name, parameter in layer.named_parameters():
        is_expert = ".deepspeed_experts." in name
        assert getattr(parameter, "allreduce", True) is not is_expert
        assert getattr(parameter, "group_name", None) == ("ep_size_2" if is_expert else None)
