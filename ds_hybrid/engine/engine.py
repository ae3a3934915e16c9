"""The engine: DeepSpeed's, with MoE layers of ours, experts that move, and checkpoints that know where they were.

A test pins the source of each method that is overridden here, and fails when another DeepSpeed changes them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups, log_dist
from torch import Tensor, nn

from ds_hybrid.config import HybridConfig
from ds_hybrid.engine.adapters import base_model, refuse_adapted_experts
from ds_hybrid.engine.auto_dispatch import AutoDispatch
from ds_hybrid.engine.checkpoint import (
    CARRIED_KEY,
    LATEST_UNIVERSAL,
    Record,
    SavedCheckpoint,
    agree_on_tag,
    do_together,
    read_saved,
    write_record,
)
from ds_hybrid.engine.clipping import clip_gradients
from ds_hybrid.engine.expert_costs import CostMeter
from ds_hybrid.engine.groups import NodeCutter, expert_grid, expert_groups_of_all_ranks
from ds_hybrid.engine.load_plan import LoadPlan, plan_load
from ds_hybrid.engine.moe_stats import StatsReader
from ds_hybrid.engine.observer import Observer
from ds_hybrid.engine.parameter_groups import split_groups, split_optimizer
from ds_hybrid.engine.rebalancer import Rebalancer
from ds_hybrid.engine.resharding import LocalNames, load_unparted_optimizer, load_untrained, whole_names
from ds_hybrid.engine.router_logits import record_router_logits, router_recorders_hidden
from ds_hybrid.engine.run_facts import run_record
from ds_hybrid.engine.sequence_parallel import SequenceParallel
from ds_hybrid.engine.staging import begin, publish, staged_tag
from ds_hybrid.engine.tensor_parallel import refuse_empty_shards, sum_gradients_of_blocks
from ds_hybrid.engine.watcher import Watcher
from ds_hybrid.engine.whole_weights import gather_whole, named_blocks, save_whole_model
from ds_hybrid.errors import CheckpointError, ConfigError, PlacementError
from ds_hybrid.moe.autoep import HybridAutoEPLayer
from ds_hybrid.moe.correction_bias import update_correction_biases
from ds_hybrid.moe.hugging_face_names import HuggingFaceBlock
from ds_hybrid.moe.kinds import MoELayer
from ds_hybrid.moe.layer import MoE
from ds_hybrid.observe.compose import Progress
from ds_hybrid.observe.events import RunRecord
from ds_hybrid.observe.stats import MoEStats
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.migrate import MoveReport, move_experts
from ds_hybrid.topology.cluster import Cluster


class MoEEngine(DeepSpeedEngine):
    """DeepSpeed's engine whose MoE layers, converted or explicit, dispatch through ds_hybrid.

    Args:
        hybrid_config: the checked ``ds_hybrid`` section.
        cluster: the hosts and links that the ranks run on.
        sequence_parallel: who shares sequences; None: nobody, or DeepSpeed's Ulysses.
        kwargs: what ``DeepSpeedEngine`` takes.

    Attributes:
        group_origins: for each parameter group the index of the client optimizer's group that it was cut from; None
            where nothing was split.
    """

    has_moe_layers: bool
    group_origins: list[int] | None

    def __init__(
        self,
        *,
        hybrid_config: HybridConfig,
        cluster: Cluster,
        sequence_parallel: SequenceParallel | None = None,
        **kwargs: Any,
    ) -> None:
        self.hybrid_config = hybrid_config
        self.cluster = cluster
        self.sequence_parallel = sequence_parallel
        self._cut_by_nodes = NodeCutter(cluster)
        self.group_origins = None
        self._observer: Watcher = Watcher()  # also of an engine that cannot be made
        self._blocks: tuple[HuggingFaceBlock, ...] = ()
        super().__init__(**kwargs)
        if sequence_parallel is not None:
            sequence_parallel.of_engine(self)
        layers = list(self.moe_layers_by_name().values())
        self._stats = StatsReader(layers)
        self._auto_dispatch = AutoDispatch([layer.switch for layer in layers])
        ep_sizes = sorted({layer.ep_size for layer in layers})
        self._expert_groups = expert_groups_of_all_ranks([f"ep_size_{size}" for size in ep_sizes])
        self._expert_grids = {size: expert_grid(f"ep_size_{size}") for size in ep_sizes}
        self._rebalancer = self._make_rebalancer(layers)
        self._observer = self._make_observer(layers)

    def _make_rebalancer(self, layers: Sequence[MoELayer]) -> Rebalancer | None:
        config = self.hybrid_config.rebalance
        if not config.enabled or not layers:
            return None
        costs = CostMeter(layers, self._expert_grids, self._groups_of_size(), self.cluster, self._cut_by_nodes)
        return Rebalancer(layers, config, costs, self._move_experts)

    def _make_observer(self, layers: Sequence[MoELayer]) -> Watcher:
        config = self.hybrid_config.observe
        if config.directory is None and not self.monitor.enabled:
            return Watcher()

        def describe(no_nvlink: str | None) -> RunRecord:
            return run_record(
                self.config,
                self.module,
                layers,
                self.cluster,
                self._groups_of_size(),
                self._expert_grids,
                tp_size=self.autotp_size() or 1,
                no_nvlink=no_nvlink,
            )

        attention = None if self.sequence_parallel is None else self.sequence_parallel.shared
        return Observer(config, layers, self.module, self.monitor, self.cluster, describe, self.get_lr, attention)

    def _groups_of_size(self) -> dict[int, list[list[int]]]:
        """All expert-parallel groups by the number of their ranks."""
        return {size: self._expert_groups[f"ep_size_{size}"] for size in self._expert_grids}

    def _configure_expert_parallel(self, model: nn.Module, collect_sources: bool | None = None) -> Any:
        converts = self.expert_parallel_is_on()
        experts_name = (self._config.expert_parallel_config.expert_pattern or "experts") if converts else None
        refuse_adapted_experts(model, converted=experts_name)
        if converts:
            self._blocks = named_blocks(model, self.config["expert_parallel"])
        with router_recorders_hidden(model):
            # AutoEP looks for layers by their names in the model that adapters wrap.
            sources = super()._configure_expert_parallel(base_model(model), collect_sources)
        adopted = self._adopt_converted_layers(model)
        record_router_logits(model, adopted)
        self._configure_explicit_layers(model)
        if self.expert_parallel_is_on() and not adopted:
            log_dist("ds_hybrid: the model has no MoE layer that AutoEP knows", ranks=[0], level=logging.WARNING)
        return sources

    def _adopt_converted_layers(self, model: nn.Module) -> list[HybridAutoEPLayer]:
        dispatch = self.hybrid_config.dispatch
        converted = {name: layer for name, layer in model.named_modules() if type(layer) is AutoEPMoELayer}
        return [
            HybridAutoEPLayer.adopt(layer, name=name, dispatch=dispatch, cut_by_nodes=self._cut_by_nodes)
            for name, layer in converted.items()
        ]

    def _configure_explicit_layers(self, model: nn.Module) -> None:
        for name, layer in model.named_modules():
            if not isinstance(layer, MoE):
                continue
            if self.zero_optimization_partition_weights():
                raise ConfigError(
                    f"zero_optimization.stage = 3: {name or 'the model'} is a ds_hybrid.MoE, which DeepSpeed "
                    "trains with stages 0, 1 and 2."
                )
            layer.configure(name=name, dispatch=self.hybrid_config.dispatch, cut_by_nodes=self._cut_by_nodes)

    def _configure_tensor_parallel(self, model: nn.Module, tp_config: Any) -> Any:
        sources = super()._configure_tensor_parallel(model, tp_config)
        if self.expert_parallel_is_on():
            sum_gradients_of_blocks(model, groups.get_tensor_model_parallel_group())
            if self.zero_optimization_partition_weights():
                refuse_empty_shards(model)
        return sources

    def expert_parallel_is_on(self) -> bool:
        """Whether the ds_config lets AutoEP convert layers."""
        config = self._config.expert_parallel_config
        return config is not None and config.enabled

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        if self.has_moe_layers:
            partitioned = self.zero_optimization()
            if isinstance(client_optimizer, torch.optim.Optimizer):
                self.group_origins = split_optimizer(
                    client_optimizer, self.client_lr_scheduler, trainable_only=partitioned
                )
            else:
                model_parameters = split_groups(model_parameters, trainable_only=partitioned).groups
        super()._configure_optimizer(client_optimizer, model_parameters)

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        # DeepSpeed's ZeRO 1 and 2 refuse a model with MoE layers none of whose experts train. Stage 3 must know of the
        # layers all the same: it parts their experts over the ranks that hold the same ones.
        has_moe_layers = self.has_moe_layers
        no_expert_trains = optimizer is not None and not any(group.get("moe") for group in optimizer.param_groups)
        if no_expert_trains and not self.zero_optimization_partition_weights():
            self.has_moe_layers = False
        try:
            return super()._configure_zero_optimizer(optimizer)
        finally:
            self.has_moe_layers = has_moe_layers

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """As DeepSpeed's."""
        with self._observer.work("backward", "backward"):
            result = super().backward(loss, retain_graph, scale_wrt_gas)
        self._observer.loss(loss, is_part_of_step=not scale_wrt_gas)
        return result

    def _take_model_step(self, lr_kwargs: Any) -> None:
        with self._observer.work("optimizer", "step"):
            super()._take_model_step(lr_kwargs)
        gates = [layer.deepspeed_moe.gate for layer in self.module.modules() if isinstance(layer, MoE)]
        update_correction_biases(gates, apply=self._step_applied)
        with self._observer.work("rebalance", "step"):
            changes = self._auto_dispatch.after_step()
            look = None
            if self._rebalancer is not None:
                look = self._rebalancer.after_step(self.global_steps, self.optimizer)
        self._observer.after_step(self._progress(), changes, look)

    def _progress(self) -> Progress:
        return Progress(self.global_steps, self.global_samples)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's; the placement of experts, their groups, and what chooses dispatchers and moves are kept too.

        The files come to their place when all ranks have written theirs: whoever dies while saving leaves the previous
        checkpoint whole, and ``latest`` on it. A writer that works beside the training is waited for.

        Raises:
            CheckpointError: on every rank, when the ranks have different tags, or one cannot write; or DeepSpeed's
                files have no place for a weight.
        """
        self._observer.pause()
        tag = str(tag) if tag is not None else f"global_step{self.global_steps}"
        unsavable = self.unsavable_weight()
        if unsavable is not None:
            raise CheckpointError(
                f"save_checkpoint: zero_optimization.stage = 3, and {unsavable} is frozen: DeepSpeed's checkpoints of "
                "stage 3 have no place for frozen experts. Use stage 1 or 2, or save the weights alone "
                '(save_16bit_model; save_strategy="no" and save_model with the Trainer).'
            )
        agree_on_tag(tag)
        moves_files = (self.local_rank if self.use_node_local_storage() else self.global_rank) == 0
        do_together(partial(begin, save_dir, tag) if moves_files else None, doing=f"begin {save_dir}/{tag}")
        placements = {
            name: layer.placement.expert_of_slot.tolist() for name, layer in self.moe_layers_by_name().items()
        }
        carried: dict[str, Any] = {"placements": placements}
        if isinstance(self.optimizer, torch.optim.Optimizer):
            parameters = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
            carried["optimizer_names"] = [self.param_names[parameter] for parameter in parameters]
        rebalance = {} if self._rebalancer is None else self._rebalancer.state()
        record = Record(self._expert_groups, self._auto_dispatch.state(), placements, rebalance)
        state = {**(client_state or {}), CARRIED_KEY: carried}
        super().save_checkpoint(save_dir, staged_tag(tag), state, False, exclude_frozen_parameters)
        if self.checkpoint_engine.is_decoupled():
            self._commit_decoupled_checkpoint()

        def finish() -> None:
            write_record(Path(save_dir, staged_tag(tag)), record)
            publish(save_dir, tag, save_latest=save_latest)

        do_together(finish if moves_files else None, doing=f"finish {save_dir}/{tag}")
        return True

    def unsavable_weight(self) -> str | None:
        """The first weight that DeepSpeed's checkpoints have no place for: a frozen one of experts at ZeRO 3."""
        if not self.zero_optimization_partition_weights():
            return None
        weights = (
            (f"{name}.experts.{inner}", parameter)
            for name, layer in self.moe_layers_by_name().items()
            if isinstance(layer, HybridAutoEPLayer)
            for inner, parameter in layer.experts.named_parameters()
        )
        return next((name for name, parameter in weights if not parameter.requires_grad), None)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As DeepSpeed's; the experts are placed as they were. A checkpoint that DeepSpeed has saved is loaded as well.

        Raises:
            CheckpointError: on every rank and before anything changes, when the placement is missing or is not that of
                the files; or the experts were on other ranks, and their optimizer's part is to be loaded.
        """
        universal = self.load_universal_checkpoint()
        saved = read_saved(load_dir, tag, latest=LATEST_UNIVERSAL if universal else "latest")
        with_optimizer = load_optimizer_states and not load_module_only
        plan = None if saved is None else self._plan_load(saved, with_optimizer=with_optimizer)
        layers = self.moe_layers_by_name()
        with contextlib.ExitStack() as undo:
            undo.callback(_place_all, layers, {name: layer.placement for name, layer in layers.items()})
            _place_all(layers, plan.placements if plan else {})
            local = LocalNames(layers)  # by the placements of now
            with whole_names(self.param_names, local) if universal else contextlib.nullcontext():
                path, client_state = super().load_checkpoint(
                    load_dir,
                    tag,
                    load_module_strict,
                    load_optimizer_states and not (plan and plan.parts_optimizer_anew),
                    load_lr_scheduler_states,
                    load_module_only,
                    custom_load_fn,
                )
            if path is not None:
                undo.pop_all()
        if client_state is not None:
            client_state.pop(CARRIED_KEY, None)
        if path is None:
            return path, client_state
        if saved is not None and plan is not None:
            self._load_the_rest(saved, plan, local, module_only=load_module_only)
        self._observer.resumed(self.global_steps, str(path))
        return path, client_state

    def _load_the_rest(self, saved: SavedCheckpoint, plan: LoadPlan, local: LocalNames, *, module_only: bool) -> None:
        """What DeepSpeed has not loaded: states parted anew, and what chooses dispatchers and moves."""
        if saved.is_universal:
            load_untrained(self.module, Path(saved.folder), local)
        if plan.parts_optimizer_anew:
            load_unparted_optimizer(self.optimizer, self.param_names, local, saved, plan.saved_placements)
        if saved.record is None:
            return
        self._auto_dispatch.restore(saved.record.dispatch)
        if self._rebalancer is not None:
            # The state counts in steps of the run that saved it, which alone weights do not go on with.
            state = {} if module_only else saved.record.rebalance
            self._rebalancer.restore(state, step=self.global_steps)

    def _plan_load(self, saved: SavedCheckpoint, *, with_optimizer: bool) -> LoadPlan:
        return plan_load(
            saved,
            {name: layer.placement for name, layer in self.moe_layers_by_name().items()},
            self._expert_groups,
            world_size=self.seq_dp_world_size,
            zero_stage=self.zero_optimization_stage(),
            universal=self.load_universal_checkpoint(),
            with_optimizer=with_optimizer and self.optimizer is not None,
            optimizer_is_torchs=isinstance(self.optimizer, torch.optim.Optimizer),
        )

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """As DeepSpeed's, with the experts of all ranks: one file, by Hugging Face's names where there are any.

        All ranks call it. A name that ends in ".safetensors" gives that format.
        """
        self._observer.pause()
        if not self.moe_layers_by_name():
            return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)
        return save_whole_model(
            self, self._blocks, save_dir, save_filename, exclude_frozen_parameters=exclude_frozen_parameters
        )

    def whole_state_dict(self, *, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The weights of the whole model on rank 0's CPU, by Hugging Face's names where there are any; {} elsewhere.

        Experts of all ranks are there in logical order. All ranks call it.
        """
        self._observer.pause()
        return gather_whole(self, self._blocks, exclude_frozen_parameters=exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        if not self.moe_layers_by_name():
            self._observer.pause()
            return super()._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        state = self.whole_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return state if self.global_rank == 0 else None

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm of the whole model, experts of all ranks and shards of AutoTP included."""
        # AutoTP makes the module of the groups the mpu.
        is_known = self.mpu in (None, groups) or self.sequence_parallel is not None
        if self.has_moe_layers and is_known:
            self._global_grad_norm = float(clip_gradients(self.module.parameters(), self.gradient_clipping()))
        else:
            super().clip_fp32_gradients()

    def get_sequence_parallel_group(self) -> Any:
        """The ranks that share a sequence, ours or those of DeepSpeed's Ulysses."""
        if self.sequence_parallel is not None:
            return self.sequence_parallel.groups.group
        return super().get_sequence_parallel_group()

    def move_experts(self, targets: Mapping[str, ExpertPlacement]) -> MoveReport:
        """Bring experts to other ranks, with all that training needs of them. All ranks call it, between two steps.

        Args:
            targets: by layer name; the ranks come out as named, the slots on them may differ.

        Raises:
            PlacementError: on every rank; see :func:`ds_hybrid.rebalance.migrate.move_experts`. Or gradients of some
                micro-batches have been accumulated, and the step is still to come.
        """
        num_micro_batches = self.gradient_accumulation_steps()
        done: int | str = self.micro_steps % num_micro_batches
        if self._is_gradient_accumulation_boundary is not None:
            # Set by the caller, as Accelerate does, which steps at the boundary alone: micro_steps counts steps then.
            done = 0 if self._is_gradient_accumulation_boundary else "some"
        if done:
            raise PlacementError(
                f"move_experts after {done} of {num_micro_batches} micro-batches: their gradients would go to other "
                "experts. Call it after the engine's step that ends them."
            )
        began = time.perf_counter()
        report = self._move_experts(targets)
        get_accelerator().synchronize()
        self._observer.moved(self._progress(), targets, report, time.perf_counter() - began)
        return report

    def destroy(self) -> None:
        """As DeepSpeed's; the files of the run are closed."""
        observer, self._observer = self._observer, Watcher()
        observer.close()  # once: DeepSpeed calls this again when the engine goes away
        super().destroy()

    def _move_experts(self, targets: Mapping[str, ExpertPlacement]) -> MoveReport:
        return move_experts(list(self.moe_layers_by_name().values()), targets, self._expert_grids, self.optimizer)

    def moe_layers_by_name(self) -> dict[str, MoELayer]:
        """The MoE layers in model order, converted and explicit ones."""
        layers = (layer for layer in self.module.modules() if isinstance(layer, MoELayer))
        return {layer.layer_name: layer for layer in layers}

    def moe_stats(self) -> MoEStats:
        """Traffic and load of every MoE layer since the previous call, summed over all ranks. All ranks call it.

        Bytes and tokens are those of every forward, evaluation included; load is that of training alone.
        """
        return self._stats.take()


def _place_all(layers: Mapping[str, MoELayer], placements: Mapping[str, ExpertPlacement]) -> None:
    for name, placement in placements.items():
        layers[name].place(placement)
