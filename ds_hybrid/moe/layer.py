"""``ds_hybrid.MoE``: DeepSpeed's explicit MoE layer, computed by ds_hybrid."""

from __future__ import annotations

import os
from typing import Any, Literal

import deepspeed.comm as dist
import torch
from deepspeed.moe.layer import MoE as DeepSpeedMoE
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import Tensor, nn

from ds_hybrid.config import DispatchConfig
from ds_hybrid.dispatch.collectives import LoneRank, RankGroup
from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.hierarchical import CutByNodes
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.modes import Mode
from ds_hybrid.dispatch.spans import is_in_backward
from ds_hybrid.dispatch.switch import DispatchSwitch
from ds_hybrid.dispatch.traffic import WireShape
from ds_hybrid.errors import ConfigError, DispatchError
from ds_hybrid.moe.arguments import NOISE_OF_POLICY, check_arguments, check_dispatch, check_world_size
from ds_hybrid.moe.capacity import Capacity, DropPolicy
from ds_hybrid.moe.local_experts import ExpertSource, LocalExperts, build_expert
from ds_hybrid.moe.relocate import relocate
from ds_hybrid.moe.routed_experts import MoEResult, RoutedExperts
from ds_hybrid.moe.router import Router, RouterOptions, ScoreFunction
from ds_hybrid.placement import ExpertPlacement


class MoE(DeepSpeedMoE):
    """A mixture of experts with the arguments, the results and the state dict of ``deepspeed.moe.layer.MoE``.

    DeepSpeed takes it for its own layer: groups, ZeRO 0 to 2, gradient reduction and checkpoints are DeepSpeed's. Three
    defaults differ: nothing is dropped and nothing is random unless asked (``drop_tokens``, ``use_rts`` and
    ``top2_2nd_expert_sampling`` are False).

    With ``ep_size`` above 1 every forward and backward is a collective call of the expert-parallel group, in
    evaluation too: all its ranks make the same calls, if need be with no tokens. With ``ep_size`` 1 there is no
    communication.

    Args:
        hidden_size: H, of input and output.
        expert: a factory ``lambda: MLP(...)``, called once for each expert with its own seed, or a module, of which
            each expert gets a copy with shuffled initial values (see
            :func:`ds_hybrid.moe.local_experts.build_expert`). It maps [rows, H] to [rows, H]; rows may be 0.
        num_experts, ep_size: E experts, contiguous runs of E / ep_size on the ranks of each expert-parallel group.
        k: experts per token, 1 to E.
        capacity_factor, eval_capacity_factor, min_capacity: with ``drop_tokens``, see
            :class:`ds_hybrid.moe.capacity.Capacity`.
        use_residual: Residual MoE (arXiv 2201.05596): a dense expert beside the routed ones, mixed by a learned
            coefficient. A given module becomes that dense expert itself.
        noisy_gate_policy: None, "Jitter" or "RSample", in training only.
        drop_tokens: drop what exceeds an expert's capacity, chosen by ``drop_policy``. Each kept (token, expert) pair
            then travels by itself.
        use_rts: random token selection, short for ``drop_policy="random"``.
        use_tutel, enable_expert_tensor_parallelism: only False.
        top2_2nd_expert_sampling: with k = 2, draw the second expert, in training only.
        dispatch: a dispatcher's name, or "auto": what the ds_config says, and if that is auto too, the one that is
            quickest by measured routing and links (with a :class:`ds_hybrid.MoEEngine`; else the one that sends the
            fewest bytes).
        drop_policy: "probability", "position" or "random".
        score, num_groups, topk_groups, weight_scale, z_loss_weight, bias_update_rate: see
            :class:`ds_hybrid.moe.router.RouterOptions`. The bias moves once per optimizer step of a
            :class:`ds_hybrid.MoEEngine`.
        normalize_weights: a token's weights sum to 1 over its kept experts; None for k > 1 only, as DeepSpeed does.
        seed: of the experts' initial values; None draws one from torch's generator. Equal on all ranks.

    Attributes:
        layer_name: for messages and statistics.
        meter: what this rank sent for this layer.
        expert_load: [E] int64, how many (token, choice) pairs of this rank chose each expert in training.

    Raises:
        ConfigError: every argument that breaks a rule.
    """

    expert_load: Tensor

    def __init__(
        self,
        hidden_size: int,
        expert: ExpertSource,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = False,
        use_rts: bool = False,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = False,
        *,
        dispatch: Mode | Literal["auto"] = "auto",
        drop_policy: DropPolicy = "probability",
        score: ScoreFunction = "softmax",
        normalize_weights: bool | None = None,
        weight_scale: float = 1.0,
        num_groups: int = 1,
        topk_groups: int = 1,
        z_loss_weight: float = 0.0,
        bias_update_rate: float = 0.0,
        seed: int | None = None,
    ) -> None:
        check_arguments(
            num_experts=num_experts,
            ep_size=ep_size,
            k=k,
            capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor,
            min_capacity=min_capacity,
            noisy_gate_policy=noisy_gate_policy,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
            use_tutel=use_tutel,
            enable_expert_tensor_parallelism=enable_expert_tensor_parallelism,
            dispatch=dispatch,
            drop_policy=drop_policy,
            score=score,
            num_groups=num_groups,
            topk_groups=topk_groups,
            z_loss_weight=z_loss_weight,
            bias_update_rate=bias_update_rate,
        )
        nn.Module.__init__(self)  # not DeepSpeed's constructor: it would build its own gate and identical experts
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.ep_size = ep_size
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = False
        self.layer_name = "MoE layer"
        self.meter = Meter()
        self._asked_mode: Mode | Literal["auto"] = dispatch
        self._dispatch_config = DispatchConfig()
        self._cut_by_nodes: CutByNodes | None = None
        self.register_buffer("expert_load", torch.zeros(num_experts, dtype=torch.int64), persistent=False)

        policy: DropPolicy = "random" if use_rts else drop_policy
        sampled = top2_2nd_expert_sampling and k == 2
        options = RouterOptions(
            top_k=k,
            score=score,
            normalize=k > 1 if normalize_weights is None else normalize_weights,
            weight_scale=weight_scale,
            num_groups=num_groups,
            topk_groups=topk_groups,
            noise="gumbel_second" if sampled else NOISE_OF_POLICY[noisy_gate_policy],
            capacity=Capacity(capacity_factor, eval_capacity_factor, min_capacity, policy) if drop_tokens else None,
            z_loss_weight=z_loss_weight,
            bias_update_rate=bias_update_rate,
        )
        if seed is None:
            seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        placement = ExpertPlacement.contiguous(num_experts, ep_size)
        self._built_for_rank = _global_rank() % ep_size
        expert_ids = placement.expert_of_slot[self._built_for_rank].tolist()
        experts = [build_expert(expert, seed=seed, expert_id=expert_id) for expert_id in expert_ids]
        self.deepspeed_moe = RoutedExperts(
            Router(hidden_size, num_experts, options), LocalExperts(experts, self.expert_group_name), placement
        )
        if use_residual:
            self.mlp: nn.Module = (
                expert if isinstance(expert, nn.Module) else build_expert(expert, seed=seed, expert_id=num_experts)
            )
            self.coefficient = nn.Linear(hidden_size, 2)
        if ep_size == 1:
            self._bind(LoneRank(self.meter))

    @property
    def top_k(self) -> int:
        """Experts per token, K."""
        return self.deepspeed_moe.gate.options.top_k

    @property
    def placement(self) -> ExpertPlacement:
        """Which rank and slot holds which expert."""
        return self.deepspeed_moe.placement

    def place(self, placement: ExpertPlacement) -> None:
        """Find the experts where ``placement`` has them. Moves nothing."""
        self.deepspeed_moe.placement = placement

    @property
    def switch(self) -> DispatchSwitch:
        """The dispatcher, and the others that mode ``auto`` may take, once the layer has its expert-parallel group."""
        return self.deepspeed_moe.switch

    @property
    def dispatcher(self) -> Dispatcher[Any]:
        """What moves the tokens at present."""
        return self.switch.dispatcher

    def configure(self, *, name: str, dispatch: DispatchConfig, cut_by_nodes: CutByNodes | None = None) -> None:
        """Take the layer's name, and from the ds_config what the constructor left open; before the group is bound.

        Args:
            cut_by_nodes: gives the parts of an expert-parallel group; ``hierarchical`` needs it.

        Raises:
            ConfigError: the ds_config asks for what only converted layers do.
        """
        check_dispatch(dispatch, layer=name)
        self.layer_name = name
        self._dispatch_config = dispatch
        self._cut_by_nodes = cut_by_nodes

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Called by DeepSpeed's engine: mark the experts, adapters added since included, and bind their group.

        Raises:
            ConfigError: ep_size does not divide the number of ranks, tensor parallelism is on, or no rank has built
                the experts of some place.
        """
        check_world_size(dist.get_world_size(), num_experts=self.num_experts, ep_size=self.ep_size)
        if groups.mpu is not None and bwc_tensor_model_parallel_world_size(groups.mpu) > 1:
            raise ConfigError("ds_hybrid.MoE: an mpu with tensor parallelism is not supported. Use data parallelism.")
        self.deepspeed_moe.experts.mark()
        self.deepspeed_moe.gate.restore_bias_dtype()
        if self.expert_group_name not in groups._get_expert_parallel_group_dict():
            groups._create_expert_and_data_parallel(
                self.ep_size, use_data_before_expert_parallel_=use_data_before_expert_parallel_
            )
        group = RankGroup(groups._get_expert_parallel_group(self.expert_group_name), self.meter)
        if group.size > 1:
            relocate(self.deepspeed_moe.experts, built_for=self._built_for_rank, place=group.rank)
            self._built_for_rank = group.rank
        self._bind(group)

    def _bind(self, group: RankGroup) -> None:
        gate = self.deepspeed_moe.gate
        shape = WireShape(
            num_ranks=group.size,
            num_experts=self.num_experts,
            top_k=self.top_k if gate.options.capacity is None else 1,
            hidden_size=self.hidden_size,
            value_bytes=gate.wg.weight.element_size(),
            wire_dtype=self._dispatch_config.wire_dtype,
        )
        switch = DispatchSwitch(
            self._dispatch_config.mode if self._asked_mode == "auto" else self._asked_mode,
            group,
            shape,
            layer=self.layer_name,
            guard=self._dispatch_config.guard,
            cut_by_nodes=self._cut_by_nodes,
        )
        self.deepspeed_moe.bind(switch, num_chunks=self._dispatch_config.overlap_chunks)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [..., H] -> (output [..., H], l_aux [] float32, exp_counts [E] int64).

        Args:
            used_token: [...] of any dtype; tokens where it is 0 are not routed and their output is 0. None for all.

        ``exp_counts`` is ``num_routed`` of :meth:`run`: what was asked of each expert, before dropping.
        """
        result = self.run(hidden_states, used_token)
        return result.output, result.l_aux, result.num_routed

    def run(self, hidden_states: Tensor, used_token: Tensor | None = None) -> MoEResult:
        """The layer's forward with everything it knows by name.

        Raises:
            DispatchError: ``used_token`` does not have one entry per token, or the ranks disagree.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        is_used = None if used_token is None else _as_mask(used_token, len(tokens), self.layer_name)
        result: MoEResult = self.deepspeed_moe(tokens, is_used)
        if self.training and not is_in_backward():
            self.expert_load += result.num_routed
        output = result.output.view(hidden_states.shape)
        if self.use_residual:
            output = self._mix_with_dense(output, hidden_states)
            if is_used is not None:
                output = output * is_used.view(*hidden_states.shape[:-1], 1)
        return MoEResult(output, result.l_aux, result.num_routed, result.num_processed)

    def _mix_with_dense(self, output: Tensor, hidden_states: Tensor) -> Tensor:
        dense = self.mlp(hidden_states)
        dense = dense[0] if isinstance(dense, tuple) else dense
        shares = self.coefficient(hidden_states).softmax(-1)
        return output * shares[..., :1] + dense * shares[..., 1:]


def _global_rank() -> int:
    """This process's rank, also before torch.distributed starts under a launcher that announces it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _as_mask(used_token: Tensor, num_tokens: int, layer: str) -> Tensor:
    if used_token.numel() != num_tokens:
        raise DispatchError(
            f"{layer}: used_token has shape {list(used_token.shape)}, must have one entry for each of the "
            f"{num_tokens} tokens."
        )
    return used_token.reshape(-1) != 0
