"""The layers that are compared. All share one gate and one set of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import deepspeed.comm as dist
import torch
from cases import Case, Shape, expert_weights, gate_weight, normalizes, swiglu
from deepspeed.module_inject.auto_ep_config import AutoEPConfig, MoELayerSpec
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

from ds_hybrid.config import DispatchConfig
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.modes import MODES
from ds_hybrid.engine.groups import NodeCutter
from ds_hybrid.moe.autoep import HybridAutoEPLayer
from ds_hybrid.topology.cluster import Cluster, RankReport

BASELINE = "autoep"
DEEPSPEED_MOE = "deepspeed_moe"
CONTROL = "autoep_again"
BROKEN = "broken"
DEFAULT_METHODS: tuple[str, ...] = (BASELINE, CONTROL, "autoep_loop", "autoep_fused", DEEPSPEED_MOE, *MODES)
DESCRIPTIONS: dict[str, str] = {
    BASELINE: "DeepSpeed AutoEP, grouped matrix product (its default)",
    CONTROL: "the same layer once more: the noise",
    "autoep_loop": "DeepSpeed AutoEP, loop over experts",
    "autoep_fused": "DeepSpeed AutoEP, gate and up as one grouped product",
    DEEPSPEED_MOE: "deepspeed.moe.layer.MoE without dropping",
    BROKEN: "two_stage times 1.001: must be found wrong",
}
"""The rest are ds_hybrid's, by the name of their mode."""


@dataclass(frozen=True)
class Setup:
    """What a method of ds_hybrid needs.

    Attributes:
        mode: its dispatcher.
        options: other keys of the section ``ds_hybrid.dispatch``.
        tolerance: the relative error that it may have in float32.
        missing: what it needs and this benchmark cannot give it.
    """

    mode: str
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5
    missing: str | None = None


SETUPS: dict[str, Setup] = {
    **{mode: Setup(mode) for mode in MODES},
    "hierarchical": Setup("hierarchical"),  # over two halves of the ranks, as if each were a node
    "replicated": Setup("replicated", missing="needs the same tokens on all ranks, as tensor parallelism gives them"),
    "two_stage_fp8": Setup("two_stage", {"wire_dtype": "fp8_e4m3"}, tolerance=6e-2),
    "two_stage_4_chunks": Setup("two_stage", {"overlap_chunks": 4}),
    BROKEN: Setup("two_stage"),
}
"""``MODES`` need nothing but a group, so new ones join by themselves; the others run when they are named."""

METHODS: tuple[str, ...] = tuple(dict.fromkeys((*DEFAULT_METHODS, *SETUPS)))


@dataclass(frozen=True)
class Method:
    """A layer to run.

    Attributes:
        forward: [T, H] -> [T, H].
        module: holds its parameters.
        meter: its own count of bytes; DeepSpeed's layers have none.
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    module: nn.Module
    meter: Meter | None = None


def setup_of(name: str) -> Setup:
    """DeepSpeed's layers need nothing either."""
    return SETUPS.get(name, Setup(name))


def build_baseline(case: Case, device: torch.device) -> Method:
    """AutoEP with grouped matrix products: the layer that the others share their parameters with."""
    config = AutoEPConfig(enabled=True, autoep_size=case.ep_size)
    return _method_of(BASELINE, _autoep(case, config, _source(case, device)))


def build(name: str, case: Case, baseline: Method) -> Method:
    """The method of that name on the parameters of ``baseline``."""
    if name == CONTROL:
        return Method(name, baseline.forward, baseline.module)
    if name == DEEPSPEED_MOE:
        return _deepspeed_moe(case, baseline)
    config = AutoEPConfig(
        enabled=True,
        autoep_size=case.ep_size,
        use_grouped_mm=name != "autoep_loop",
        gate_up_impl="fused" if name == "autoep_fused" else "separate",
    )
    layer = _autoep(case, config, _empty_source(case, next(baseline.module.parameters()).device))
    for path, parameter in baseline.module.named_parameters():
        owner, _, attribute = path.rpartition(".")
        setattr(layer.get_submodule(owner), attribute, parameter)
    if name in ("autoep_loop", "autoep_fused"):
        return _method_of(name, layer)
    dispatch = DispatchConfig.model_validate({"mode": setup_of(name).mode, **setup_of(name).options})
    hybrid = HybridAutoEPLayer.adopt(layer, name=name, dispatch=dispatch, cut_by_nodes=NodeCutter(_two_nodes()))
    hybrid.set_deepspeed_parallelism()
    if name == BROKEN:
        hybrid.register_forward_hook(lambda module, inputs, output: output * 1.001)
    return _method_of(name, hybrid, hybrid.meter)


def _two_nodes() -> Cluster:
    """The ranks as if the first half of them were on one node and the rest on another, for ``hierarchical``."""
    half = dist.get_world_size() / 2
    nodes = [str(int(rank >= half)) for rank in range(dist.get_world_size())]
    return Cluster.from_reports([RankReport(host_key=node, host_name=f"node-{node}") for node in nodes])


def _method_of(name: str, layer: nn.Module, meter: Meter | None = None) -> Method:
    return Method(name, lambda tokens: layer(tokens[None])[0], layer, meter)


def _autoep(case: Case, config: AutoEPConfig, source: nn.Module) -> AutoEPMoELayer:
    layer = AutoEPMoELayer(_spec(case.shape), source, case.ep_size, dist.get_rank() % case.ep_size, config)
    layer.set_deepspeed_parallelism()
    assert dist.get_rank(group=layer.ep_group) == layer.ep_rank
    return layer


def _source(case: Case, device: torch.device) -> nn.Module:
    """A block as Hugging Face's Mixtral has it. Only this rank's experts have values."""
    source = _empty_source(case, device)
    num_local = case.shape.num_experts // case.ep_size
    first = dist.get_rank() % case.ep_size * num_local
    with torch.no_grad():
        source.gate.weight.copy_(gate_weight(case))
        for expert in range(first, first + num_local):
            for parameter, value in zip(source.experts.parameters(), expert_weights(case, expert), strict=True):
                parameter[expert].copy_(value)
    return source


def _empty_source(case: Case, device: torch.device) -> Any:
    shape = case.shape
    source, experts = nn.Module(), nn.Module()
    source.gate = nn.Linear(shape.hidden_size, shape.num_experts, bias=False, device=device)
    source.experts = experts
    wide = (shape.num_experts, shape.expert_width, shape.hidden_size)
    for name, size in (("w1", wide), ("w3", wide), ("w2", (wide[0], wide[2], wide[1]))):
        experts.register_parameter(name, nn.Parameter(torch.empty(size, device=device)))
    return source


def _spec(shape: Shape) -> MoELayerSpec:
    return MoELayerSpec(
        moe_module_name="benchmark",
        model_family="mixtral",
        router_name="gate",
        experts_name="experts",
        expert_storage="fused_3d",
        expert_w1_name="w1",
        expert_w2_name="w2",
        expert_w3_name="w3",
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.expert_width,
        score_func="softmax",
        score_apply="post",
        route_norm=normalizes(shape),
        gate_bias=False,
        return_router_logits=False,
        router_logits_capture_target="none",
        router_logits_capture_index=None,
        router_logits_capture_layer_name=None,
        has_shared_experts=False,
        shared_experts_name="",
    )


class _Expert(nn.Module):
    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        wide = (shape.expert_width, shape.hidden_size)
        self.w1 = nn.Parameter(torch.empty(wide, device=device))
        self.w3 = nn.Parameter(torch.empty(wide, device=device))
        self.w2 = nn.Parameter(torch.empty(wide[::-1], device=device))

    def forward(self, rows: Tensor) -> Tensor:
        return swiglu(rows, self.w1, self.w3, self.w2)


def _deepspeed_moe(case: Case, baseline: Method) -> Method:
    shape = case.shape
    autoep: Any = baseline.module
    gate, experts = autoep.router.gate.weight, autoep.experts
    layer = MoE(
        shape.hidden_size,
        _Expert(shape, gate.device),
        num_experts=shape.num_experts,
        ep_size=case.ep_size,
        k=shape.top_k,
        drop_tokens=False,
        use_rts=False,
        top2_2nd_expert_sampling=False,
        min_capacity=0,
    )
    layer.deepspeed_moe.gate.wg.weight = gate
    # Its experts are separate parameters, so they are copies.
    with torch.no_grad():
        for slot, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            expert.w1.copy_(experts.w1[slot])
            expert.w3.copy_(experts.w3[slot])
            expert.w2.copy_(experts.w2[slot])
    layer.set_deepspeed_parallelism()
    return Method(DEEPSPEED_MOE, lambda tokens: layer(tokens[None])[0][0], layer)
