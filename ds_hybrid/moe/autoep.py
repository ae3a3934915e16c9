"""DeepSpeed's AutoEP layer with our dispatch in the middle.

The layer stays an ``AutoEPMoELayer``: DeepSpeed builds it from the Hugging Face block, names its groups, partitions,
clips and saves its parameters. Between its router and its output tail runs one of our dispatchers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from deepspeed.checkpoint.autoep_affine import autoep_placement_to_affine_map, make_autoep_placement_descriptor
from deepspeed.checkpoint.constants import (
    AFFINE_MAP,
    AUTOEP_EXPERT_PLACEMENT,
    AUTOEP_PARAM_LOCAL_EXPERTS,
    AUTOEP_PARAM_LOGICAL_SHAPE,
    DS_AUTOEP_UC_META,
)
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from torch import Tensor

from ds_hybrid.config import DispatchConfig
from ds_hybrid.dispatch.collectives import LoneRank, RankGroup
from ds_hybrid.dispatch.dispatcher import Dispatcher
from ds_hybrid.dispatch.hierarchical import CutByNodes
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.overlap import run_in_chunks
from ds_hybrid.dispatch.routing import Routing, count_values
from ds_hybrid.dispatch.shares import TokenShares
from ds_hybrid.dispatch.spans import is_in_backward
from ds_hybrid.dispatch.switch import DispatchSwitch
from ds_hybrid.dispatch.traffic import WireShape
from ds_hybrid.errors import ConfigError
from ds_hybrid.moe.experts import HybridExperts
from ds_hybrid.placement import ExpertPlacement


class HybridAutoEPLayer(AutoEPMoELayer):
    """A Hugging Face MoE block whose tokens travel through a ds_hybrid dispatcher. Made by :meth:`adopt`.

    Attributes:
        layer_name: the block's name in the model, for messages and statistics.
        placement: which rank and slot holds which expert of the model.
        same_tokens: the tensor-parallel group, whose ranks have the same tokens; this rank alone without one.
        switch: the dispatcher, and the others that mode ``auto`` may take.
        meter: what this rank sent for this layer.
        expert_load: [E] int64, how many (token, choice) pairs of this rank chose each expert in training. Ranks with
            the same tokens count a share each.
    """

    layer_name: str
    placement: ExpertPlacement
    same_tokens: RankGroup
    switch: DispatchSwitch
    meter: Meter
    expert_load: Tensor

    @classmethod
    def adopt(
        cls,
        layer: AutoEPMoELayer,
        *,
        name: str,
        dispatch: DispatchConfig,
        cut_by_nodes: CutByNodes | None = None,
    ) -> HybridAutoEPLayer:
        """Turn a converted layer into ours in place: its parameters, marks and hooks stay what they are.

        Args:
            name: of the layer in the model.
            cut_by_nodes: gives the parts of an expert-parallel group; ``hierarchical`` needs it.
        """
        layer.__class__ = cls
        HybridExperts.adopt(layer.experts)
        layer.layer_name = name
        layer.placement = ExpertPlacement.contiguous(layer.num_experts, layer.ep_size)
        layer.meter = Meter()
        layer._dispatch_config = dispatch
        layer._cut_by_nodes = cut_by_nodes
        # An integer buffer: DeepSpeed would cast a floating-point one to bf16, which stops counting at 256.
        load = torch.zeros(layer.num_experts, dtype=torch.int64, device=layer.tokens_per_expert.device)
        layer.register_buffer("expert_load", load, persistent=False)
        assert isinstance(layer, HybridAutoEPLayer)
        return layer

    def set_deepspeed_parallelism(self, *args: Any, **kwargs: Any) -> None:
        """Bind the expert-parallel group, and the dispatcher over it.

        Raises:
            ConfigError: the layer weighs rows before its experts.
        """
        super().set_deepspeed_parallelism(*args, **kwargs)
        if self.score_apply != "post":
            raise ConfigError(f'{self.layer_name}: expert_parallel.score_apply "{self.score_apply}" is not available.')
        self.same_tokens = LoneRank(self.meter) if self.tp_group is None else RankGroup(self.tp_group, self.meter)
        for parameter in self.experts.parameters() if self.same_tokens.size > 1 else ():
            # What such a rank has of the experts' gradients is its own, as with a shard of a weight: so marked,
            # DeepSpeed neither scales it by the tensor-parallel size nor leaves it out of the gradient norm.
            parameter.tensor_model_parallel = True
        self.switch = DispatchSwitch(
            self._dispatch_config.mode,
            RankGroup(self.ep_group, self.meter),
            self._wire_shape(),
            layer=self.layer_name,
            guard=self._dispatch_config.guard,
            cut_by_nodes=self._cut_by_nodes,
        )

    def place(self, placement: ExpertPlacement) -> None:
        """Find the experts where ``placement`` has them, and let DeepSpeed's checkpoints say so. Moves nothing."""
        self.placement = placement
        of_rank = placement.expert_of_slot.tolist()
        self.expert_placement_descriptor = make_autoep_placement_descriptor(self.num_experts, of_rank)
        for parameter in self.experts.parameters():
            metadata = getattr(parameter, DS_AUTOEP_UC_META)
            shape = metadata[AUTOEP_PARAM_LOGICAL_SHAPE]
            affine_map = autoep_placement_to_affine_map(self.expert_placement_descriptor, shape)
            described = {
                AUTOEP_EXPERT_PLACEMENT: self.expert_placement_descriptor,
                AFFINE_MAP: affine_map.to_dict(),
                AUTOEP_PARAM_LOCAL_EXPERTS: of_rank[self.ep_rank],
            }
            setattr(parameter, DS_AUTOEP_UC_META, {**metadata, **described})

    @property
    def dispatcher(self) -> Dispatcher[Any]:
        """What moves the tokens at present."""
        return self.switch.dispatcher

    def _forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        hidden_size = hidden_states.shape[-1]
        tokens = hidden_states.reshape(-1, hidden_size)
        self.meter.begin(training=self.training)
        with self.meter.spans.work("router"):
            topk_weights, topk_ids, tokens_per_expert = self.router(tokens, self.expert_bias)
        routing = Routing(topk_ids, topk_weights, self.num_experts)
        shares = TokenShares(self.same_tokens, len(tokens))
        with torch.no_grad():
            self.tokens_per_expert.add_(tokens_per_expert)
            if self.training and not is_in_backward():
                self.expert_load.add_(count_values(shares.part(topk_ids), self.num_experts))

        run = partial(
            run_in_chunks,
            self.dispatcher,
            placement=self.placement,
            experts=self.meter.timed(self.experts.run, training=self.training),
            num_chunks=self._dispatch_config.overlap_chunks,
        )
        if self.dispatcher.mode == "replicated":
            output = run(tokens, routing)
        else:
            output = shares.join(run(shares.take(tokens), shares.of_routing(routing)))
        return self._finalize_output(output.view(hidden_states.shape), tokens, hidden_states, hidden_size)

    def _wire_shape(self) -> WireShape:
        return WireShape(
            num_ranks=self.ep_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            value_bytes=self.experts.w1.element_size(),
            wire_dtype=self._dispatch_config.wire_dtype,
        )
