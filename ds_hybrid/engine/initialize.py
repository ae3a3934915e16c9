"""The one changed line: ``ds_hybrid.initialize`` builds a :class:`MoEEngine` as ``deepspeed.initialize`` its engine.

DeepSpeed offers no way to choose the engine's class, and its own ``initialize`` converts MoE layers inside the engine's
constructor. So :func:`initialize` repeats DeepSpeed's short preamble and constructs the subclass; a test pins the
source of ``deepspeed.initialize`` and every private name used here, and fails when another DeepSpeed moves them.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.tensor_parallel.init_utils import merge_tp_model_init_into_config
from deepspeed.utils import log_dist
from torch import nn

from ds_hybrid.config import HybridConfig, check, find_warnings, name_of, read_document
from ds_hybrid.engine.agreement import compare_ranks, raise_alike
from ds_hybrid.engine.engine import MoEEngine
from ds_hybrid.engine.expert_layout import expert_group_sizes, expert_layouts
from ds_hybrid.engine.groups import limit_waiting, use_expert_groups
from ds_hybrid.engine.sequence_parallel import share_sequences
from ds_hybrid.engine.versions import untested_versions
from ds_hybrid.errors import ConfigError
from ds_hybrid.topology.cluster import Cluster
from ds_hybrid.topology.probe import probe_cluster


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
) -> tuple[MoEEngine, Any, Any, Any]:
    """Same arguments and same result as ``deepspeed.initialize``: (engine, optimizer, dataloader, lr_scheduler).

    The ds_config may hold a ``ds_hybrid`` section; it is checked as a whole before anything is built.

    Raises:
        ConfigError: every problem of the ds_config at once; or a kind of model that ds_hybrid does not train; or, on
            every rank, what the ranks have built differently.
    """
    if model is None:
        raise ConfigError("ds_hybrid.initialize(model=None): a torch.nn.Module is required.")
    if isinstance(model, PipelineModule):
        raise ConfigError("ds_hybrid.initialize(model=PipelineModule): not supported. Use a plain module.")

    deepspeed.zero.partition_parameters.shutdown_init_context()
    try:
        dist.init_distributed(
            dist_backend=get_accelerator().communication_backend_name(),
            distributed_port=distributed_port,
            dist_init_required=dist_init_required,
        )
        if "LOCAL_RANK" in os.environ:
            # As DeepSpeed's engine does: the ranks of a host compare notes below, each over its own device.
            get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
        # With an mpu or a mesh, DeepSpeed takes the data-parallel size from there, and checks the sizes itself.
        world_size = dist.get_world_size() if mpu is None and not mesh_param else None
        document, hybrid_config = _agreed_config(
            args, config if config is not None else config_params, mpu, mesh_param, world_size=world_size
        )
        for warning in [*find_warnings(document, name="ds_config"), *untested_versions()]:
            log_dist(f"ds_hybrid: {warning}", ranks=[0], level=logging.WARNING)
        timeout = hybrid_config.topology.timeout_seconds
        if timeout is not None:
            limit_waiting(timeout)
        cluster = probe_cluster(hybrid_config.topology.source).cluster
        _arrange_experts(model, document, hybrid_config, cluster, deepspeeds_groups=bool(mpu or mesh_param))
        sequences = share_sequences(model, document, hybrid_config, mpu, mesh_param)
        mpu = mpu if sequences is None else sequences.groups
        mesh_device = None if sequences is not None else _mesh_device(mesh_param, document)
        if document.get("tensor_parallel", {}).get("autotp_size", 0) > 0:
            deepspeed.set_autotp_mode(training=True)
        ds_config = DeepSpeedConfig(document, mpu, mesh_device=mesh_device)
        deepspeed.set_optimizer_flags(ds_config, model)
        engine = MoEEngine(
            hybrid_config=hybrid_config,
            cluster=cluster,
            sequence_parallel=sequences,
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=document,
            mesh_device=mesh_device,
            config_class=ds_config,
        )
        compare_ranks(_facts_of_layers(engine))
        if engine.unsavable_weight() is not None:
            log_dist(
                "ds_hybrid: zero_optimization.stage = 3 and the experts are frozen: DeepSpeed cannot save checkpoints "
                'of that. Save the weights alone (save_16bit_model; save_strategy="no" and save_model with the '
                "Trainer), or use stage 1 or 2.",
                ranks=[0],
                level=logging.WARNING,
            )
        if timeout is not None:
            limit_waiting(timeout)
    finally:
        deepspeed.zero.partition_parameters.restore_init_context()
    engine._configure_python_gc()
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _agreed_config(
    args: Any, config: str | Path | Mapping[str, Any] | None, mpu: Any, mesh_param: Any, *, world_size: int | None
) -> tuple[dict[str, Any], HybridConfig]:
    """The ds_config and our section of it, when every rank has the same and no rank finds fault with it."""
    document: dict[str, Any] = {}
    hybrid_config = HybridConfig()
    problems: tuple[str, ...] = ()
    try:
        source = _config_source(args, config)
        document = copy.deepcopy(read_document(source))
        merge_tp_model_init_into_config(document, mpu, mesh_param, dist)
        hybrid_config = check(document, name=name_of(source), world_size=world_size, allow_auto=False)
    except ConfigError as error:
        problems = error.problems
    raise_alike(problems)
    compare_ranks({key: json.dumps(value, sort_keys=True, default=str) for key, value in document.items()})
    return document, hybrid_config


def _config_source(args: Any, config: str | Path | Mapping[str, Any] | None) -> str | Path | Mapping[str, Any]:
    from_args = getattr(args, "deepspeed_config", None)
    if from_args is not None and config is not None:
        raise ConfigError(
            f"ds_hybrid.initialize: args.deepspeed_config = {from_args} and config are both given. Pass one of them."
        )
    source = from_args if config is None else config
    if source is None:
        raise ConfigError("ds_hybrid.initialize: no ds_config. Pass config= or --deepspeed_config FILE.")
    return source


def _arrange_experts(
    model: nn.Module, document: Mapping[str, Any], config: HybridConfig, cluster: Cluster, *, deepspeeds_groups: bool
) -> None:
    """Make the expert groups, or leave them to DeepSpeed, and tell what speaks against them. Collective."""
    sizes = expert_group_sizes(model, document)
    compare_ranks({"the sizes of expert-parallel groups": ", ".join(map(str, sizes)) or "none"})
    layouts = expert_layouts(sizes, document, config, cluster, deepspeeds_groups=deepspeeds_groups)
    for layout in layouts.ours:
        use_expert_groups(layout, timeout_seconds=config.topology.timeout_seconds)
    for warning in (*cluster.warnings, *layouts.warnings):
        log_dist(f"ds_hybrid: {warning}", ranks=[0], level=logging.WARNING)
    for reason in layouts.reasons:
        log_dist(f"ds_hybrid: {reason}", ranks=[0])


def _mesh_device(mesh_param: Any, document: Mapping[str, Any]) -> Any:
    sizes = mesh_param
    if not sizes and {"data_parallel_size", "sequence_parallel_size"} <= document.keys():
        sizes = (document["data_parallel_size"], document["sequence_parallel_size"])
    return dist.initialize_mesh_device(sizes, ("data_parallel", "sequence_parallel")) if sizes else None


def _facts_of_layers(engine: MoEEngine) -> dict[str, str]:
    """What must be the same on every rank, in words."""
    return {
        name: f"{layer.dispatcher.mode} (guard {layer.dispatcher.guard}, {layer.dispatcher.wire_dtype} on the wire), "
        f"{layer.num_experts} experts, top-{layer.top_k}, hidden size {layer.hidden_size}"
        for name, layer in engine.moe_layers_by_name().items()
    }
