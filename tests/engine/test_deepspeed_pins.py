"""What ds_hybrid relies on inside DeepSpeed and transformers. A version that moves any of it fails here.

When this test fails, read the new source at the named place, adapt the file that uses it, then renew the entry.
"""

from __future__ import annotations

import hashlib
import inspect
from importlib import import_module
from typing import Any

import deepspeed
import pytest
from deepspeed.checkpoint import ds_to_universal, universal_checkpoint
from deepspeed.module_inject.auto_ep_folding import autoep_folding_gradient_reduction_strategy
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.auto_ep_presets import base
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, TensorParallel_Layer
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.moe.ep_repack import _repack_fused_3d, _repack_module_list, repack_expert_weights
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from deepspeed.utils.tensor_fragment import get_hp_fragment_mapping

SOURCES = {
    # engine/initialize.py repeats the first; MoEEngine and HybridAutoEPLayer override the others.
    "deepspeed.initialize": (deepspeed.initialize, "82505af39fb2e68e"),
    "DeepSpeedEngine._configure_expert_parallel": (DeepSpeedEngine._configure_expert_parallel, "49b464c0fc65f49e"),
    "DeepSpeedEngine.clip_fp32_gradients": (DeepSpeedEngine.clip_fp32_gradients, "c3ad53cbce68a72f"),
    "DeepSpeedEngine._configure_distributed_model": (DeepSpeedEngine._configure_distributed_model, "a9a57b807f5eed72"),
    "DeepSpeedEngine._take_model_step": (DeepSpeedEngine._take_model_step, "c4c6e01aa1fc4e7d"),
    "DeepSpeedEngine.backward": (DeepSpeedEngine.backward, "b8c4368bee04391d"),
    "DeepSpeedEngine._configure_optimizer": (DeepSpeedEngine._configure_optimizer, "dd82a70f2f92fe12"),
    "DeepSpeedEngine._configure_zero_optimizer": (DeepSpeedEngine._configure_zero_optimizer, "f31cf07a5d4f4170"),
    "DeepSpeedZeroOptimizer._configure_moe_settings": (
        DeepSpeedZeroOptimizer._configure_moe_settings,
        "1266af584e83dfa1",
    ),
    "DeepSpeedEngine.save_checkpoint": (DeepSpeedEngine.save_checkpoint, "c92409217281487c"),
    "DeepSpeedEngine.load_checkpoint": (DeepSpeedEngine.load_checkpoint, "5728d3dfa42a3d6c"),
    # ds_hybrid.MoE sets the attributes of the first itself, replaces the second, and is saved by the third's names.
    "MoE.__init__": (MoE.__init__, "04fd3d2bebe0874f"),
    "MoE._create_process_groups": (MoE._create_process_groups, "44dda63d114c41ba"),
    "DeepSpeedEngine._save_moe_checkpoint": (DeepSpeedEngine._save_moe_checkpoint, "cf5acf06f0a6e168"),
    # engine/universal.py writes what the second and third read and calls the fourth; engine/resharding.py changes the
    # names by which the first looks for parameters.
    "load_hp_checkpoint_state_from_checkpoint_dir": (
        ZeROOptimizer.load_hp_checkpoint_state_from_checkpoint_dir,
        "7532435ffb5b067a",
    ),
    "load_hp_checkpoint_state": (universal_checkpoint.load_hp_checkpoint_state, "981405e95ffd4c73"),
    "_resolve_autoep_partition": (universal_checkpoint._resolve_autoep_partition, "b634f745c598e0f8"),
    "ds_to_universal.main": (ds_to_universal.main, "24d330b69ba1d510"),
    "DeepSpeedZeroOptimizer.state_dict": (DeepSpeedZeroOptimizer.state_dict, "2ad067a97760517b"),
    "DeepSpeedEngine._commit_decoupled_checkpoint": (DeepSpeedEngine._commit_decoupled_checkpoint, "87f63fd0ac658106"),
    # engine/parameter_groups.py relies on options that it copies to each part.
    "split_params_into_different_moe_groups_for_optimizer": (
        split_params_into_different_moe_groups_for_optimizer,
        "5c2e395ab1153b86",
    ),
    # Made by it, and used by HybridAutoEPLayer: the attributes of the layer, the router's triple, the experts' call.
    "AutoEPMoELayer.__init__": (AutoEPMoELayer.__init__, "10cb1af357c80641"),
    "TokenChoiceTopKRouter.forward": (TokenChoiceTopKRouter.forward, "a81b54276051d4a5"),
    "GroupedExperts.__init__": (GroupedExperts.__init__, "25fa5cd6b48a930e"),
    "GroupedExperts.forward": (GroupedExperts.forward, "fc98c9cb99d7d5ad"),
    # Kept from finding anything by engine/router_logits.py, its warning with it.
    "_retarget_transformers_output_recorders_for_modules": (
        base._retarget_transformers_output_recorders_for_modules,
        "3cdcb8d2369c3968",
    ),
    # engine/tensor_parallel.py takes what the first two do out of a block, and stands in for the third; the others make
    # the marks of parameters count: what is summed over tensor-parallel ranks by name, or averaged, and in the norm.
    "LinearLayer.forward": (LinearLayer.forward, "786aec625521f312"),
    "LinearAllreduce.forward": (LinearAllreduce.forward, "4c842c2221631d18"),
    "DeepSpeedEngine._configure_tensor_parallel": (DeepSpeedEngine._configure_tensor_parallel, "4e8c82ca19d97d98"),
    "TensorParallel_Layer._freeze_partition_sizes": (TensorParallel_Layer._freeze_partition_sizes, "3b1a98189892d035"),
    "AutoTP.register_replicated_grad_hooks": (AutoTP.register_replicated_grad_hooks, "11d9cd550c5a9987"),
    "autoep_folding_gradient_reduction_strategy": (autoep_folding_gradient_reduction_strategy, "8ca7b4f974701aa0"),
    "DeepSpeedZeroOptimizer.get_grad_norm_direct": (DeepSpeedZeroOptimizer.get_grad_norm_direct, "72af0993ad8cde2c"),
    "DeepSpeedZeroOptimizer_Stage3.get_grad_norm_direct": (
        DeepSpeedZeroOptimizer_Stage3.get_grad_norm_direct,
        "5ba2252d5f16b541",
    ),
    # engine/sequence_groups.py is an mpu: what these ask it for, and what they make of the answer.
    "groups._get_data_parallel_group": (groups._get_data_parallel_group, "6175f0fb19c02a66"),
    "groups._get_data_parallel_world_size": (groups._get_data_parallel_world_size, "0954ba96657204be"),
    "groups._get_sequence_data_parallel_group": (groups._get_sequence_data_parallel_group, "3730ce54b2b4b6f4"),
    "groups._get_sequence_data_parallel_world_size": (
        groups._get_sequence_data_parallel_world_size,
        "10e504f4fc6088bc",
    ),
    "groups._get_sequence_parallel_world_size": (groups._get_sequence_parallel_world_size, "f0497752f2c767f4"),
    "DeepSpeedConfig.__init__": (DeepSpeedConfig.__init__, "a771cb4c37a8afd3"),
    "DeepSpeedEngine.deepspeed_io": (DeepSpeedEngine.deepspeed_io, "9be5fbe34df8ff48"),
    "DeepSpeedEngine._reduce_expert_gradients": (DeepSpeedEngine._reduce_expert_gradients, "e85f52672acc655b"),
    "DeepSpeedEngine.get_sequence_parallel_group": (DeepSpeedEngine.get_sequence_parallel_group, "cc38bf5e790f342a"),
    # rebalance/fragments.py finds masters and states where these put them.
    "get_hp_fragment_mapping": (get_hp_fragment_mapping, "46260f9494e68e6a"),
    "BF16_Optimizer._setup_for_real_optimizer": (BF16_Optimizer._setup_for_real_optimizer, "d5c428fde5756bc4"),
    "FP16_Optimizer.__init__": (FP16_Optimizer.__init__, "a4320f864c43c861"),
    "FP16_UnfusedOptimizer.__init__": (FP16_UnfusedOptimizer.__init__, "1b648bf170179c70"),
    "DeepSpeedZeroOptimizer_Stage3.set_grad_positions": (
        DeepSpeedZeroOptimizer_Stage3.set_grad_positions,
        "b6a16f474a21d919",
    ),
    "DeepSpeedZeroOptimizer_Stage3._get_fp32_opt_state_partition": (
        DeepSpeedZeroOptimizer_Stage3._get_fp32_opt_state_partition,
        "17cbde2bfa7a615b",
    ),
    "AutoEPMoELayer._forward": (AutoEPMoELayer._forward, "701de38e30c779bc"),
    "AutoEPMoELayer._finalize_output": (AutoEPMoELayer._finalize_output, "2f1e012aa0c3be4a"),
    # hf/ reads what these write; engine/whole_weights.py does what the last does, for all experts.
    "DeepSpeedEngine._save_zero_checkpoint": (DeepSpeedEngine._save_zero_checkpoint, "9053a2fbcfbc2a87"),
    "DeepSpeedEngine._common_checkpoint_state": (DeepSpeedEngine._common_checkpoint_state, "55303ef952c4f664"),
    "DeepSpeedEngine._get_zero_param_shapes": (DeepSpeedEngine._get_zero_param_shapes, "84be582af252b46b"),
    "DeepSpeedZeroOptimizer_Stage3._rigid_state_dict": (
        DeepSpeedZeroOptimizer_Stage3._rigid_state_dict,
        "9a67500b2f2c4a7a",
    ),
    "BF16_Optimizer.state_dict": (BF16_Optimizer.state_dict, "f03ab7b09f6dd8f6"),
    "FP16_UnfusedOptimizer.state_dict": (FP16_UnfusedOptimizer.state_dict, "ed4f86b1e3fe0882"),
    "FP16_Optimizer.state_dict": (FP16_Optimizer.state_dict, "522d99d9d150261b"),
    "DeepSpeedEngine.save_16bit_model": (DeepSpeedEngine.save_16bit_model, "a9fbf0f2e4b5229c"),
    # Overridden by MoEEngine for all experts, and to close its files.
    "DeepSpeedEngine._zero3_consolidated_16bit_state_dict": (
        DeepSpeedEngine._zero3_consolidated_16bit_state_dict,
        "4d7c0d9c1571eb8c",
    ),
    "DeepSpeedEngine.destroy": (DeepSpeedEngine.destroy, "573c7fc859fc0473"),
    # Undone by moe/hugging_face_names.py.
    "repack_expert_weights": (repack_expert_weights, "ad27a0887e6a0e3d"),
    "_repack_fused_3d": (_repack_fused_3d, "4551347586a01bdd"),
    "_repack_module_list": (_repack_module_list, "a50026a49c864c05"),
    "AutoEPMoELayer.set_deepspeed_parallelism": (AutoEPMoELayer.set_deepspeed_parallelism, "bd85913ef9cba70e"),
}

NAMES = [
    # engine/initialize.py, engine/engine.py
    "deepspeed.runtime.zero.partition_parameters:shutdown_init_context",
    "deepspeed.runtime.zero.partition_parameters:restore_init_context",
    "deepspeed.runtime.tensor_parallel.init_utils:merge_tp_model_init_into_config",
    "deepspeed:set_optimizer_flags",
    "deepspeed:set_autotp_mode",
    "deepspeed.comm:initialize_mesh_device",
    "deepspeed.constants:TORCH_DISTRIBUTED_DEFAULT_PORT",
    "deepspeed.runtime.engine:DeepSpeedEngine._configure_python_gc",
    "deepspeed.runtime.engine:DeepSpeedEngine.gradient_clipping",
    "deepspeed.runtime.engine:DeepSpeedEngine.use_node_local_storage",
    "deepspeed.runtime.engine:DeepSpeedEngine.load_universal_checkpoint",
    "deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine.is_decoupled",
    # engine/clipping.py
    "deepspeed.moe.utils:is_moe_param",
    "deepspeed.utils.groups:_get_expert_parallel_group",
    "deepspeed.runtime.utils:is_model_parallel_parameter",
    "deepspeed.utils.groups:get_tensor_model_parallel_group",
    # engine/sequence_groups.py, engine/groups.py, engine/sequence_parallel.py
    "deepspeed.utils.groups:_clone_world_group",
    "torch.distributed:ProcessGroup.group_name",
    # attention/hugging_face.py
    "transformers:AttentionInterface.register",
    "transformers:AttentionMaskInterface.register",
    "transformers.modeling_utils:PreTrainedModel.set_attn_implementation",
    "transformers.modeling_utils:PreTrainedModel._can_set_attn_implementation",
    "transformers.modeling_utils:PreTrainedModel._is_stateful",
    # engine/tensor_parallel.py
    "torch.utils._pytree:tree_map_only",
    # moe/
    "deepspeed.module_inject.auto_ep_layer:permute_by_local_expert",
    "deepspeed.module_inject.auto_ep_layer:unpermute_by_local_expert",
    "deepspeed.moe.ep_experts:GroupedExperts",
    "deepspeed.moe.ep_experts:apply_expert_activation",
    "torch:_grouped_mm",
    "deepspeed.utils.groups:_get_expert_parallel_group_dict",
    "deepspeed.utils.groups:_create_expert_and_data_parallel",
    "deepspeed.utils.groups:mpu",
    "deepspeed.utils.bwc:bwc_tensor_model_parallel_world_size",
    "deepspeed.checkpoint.autoep_affine:make_autoep_placement_descriptor",
    "deepspeed.checkpoint.autoep_affine:autoep_placement_to_affine_map",
    "deepspeed.checkpoint.constants:DS_AUTOEP_UC_META",
    "deepspeed.utils.groups:_get_expert_data_parallel_group",
    "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus.AVAILABLE",
    # moe/hugging_face_names.py
    "deepspeed.module_inject.auto_ep:AutoEP.ep_parser",
    "deepspeed.module_inject.auto_ep_config:parse_autoep_config",
    "deepspeed.moe.fused_expert_layout:classify_fused_gate_up_layout",
    # hf/
    "deepspeed.checkpoint.affine:ParamAffineMap.from_dict",
    "deepspeed.checkpoint.affine:ParamAffineMap.rebuild",
    "transformers.modeling_utils:PreTrainedModel._keep_in_fp32_modules_strict",
    "transformers.core_model_loading:revert_weight_conversion",
    # engine/whole_weights.py
    "deepspeed.module_inject.layers:TensorParallel_Layer.gather_params",
    "deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointCommitInfo",
    "deepspeed.runtime.engine:DeepSpeedEngine._optimizer_has_ckpt_event_prologue",
    "deepspeed.runtime.engine:DeepSpeedEngine._optimizer_has_ckpt_event_epilogue",
    "deepspeed.runtime.engine:DeepSpeedEngine.zero_gather_16bit_weights_on_model_save",
    # engine/router_logits.py
    "transformers.utils.output_capturing:_active_collector",
    # dispatch/missing.py, engine/groups.py
    "torch.distributed.distributed_c10d:_get_default_store",
    "torch.distributed.distributed_c10d:_set_pg_timeout",
    "torch.distributed.distributed_c10d:_world.pg_map",
    "deepspeed.utils.groups:_EXPERT_PARALLEL_GROUP_RANKS",
    "deepspeed.utils.groups:_EXPERT_DATA_PARALLEL_GROUP_RANKS",
    # dispatch/spans.py
    "torch:_C._current_graph_task_id",
]


@pytest.mark.parametrize("name", SOURCES)
def test_source_is_the_one_that_was_read(name: str) -> None:
    source, expected = SOURCES[name]
    assert written(source).__qualname__.split(".")[-1] == name.split(".")[-1]
    assert digest(source) == expected, f"{name} of DeepSpeed {deepspeed.__version__} is not the source that was read"


@pytest.mark.parametrize("name", NAMES)
def test_name_is_there(name: str) -> None:
    module, _, path = name.partition(":")
    found: Any = import_module(module)
    for part in path.split("."):
        assert hasattr(found, part), f"{name} is gone"
        found = getattr(found, part)


def test_initialize_keeps_deepspeeds_signature() -> None:
    import ds_hybrid

    def parameters(function: Any) -> list[tuple[str, Any]]:
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    assert parameters(ds_hybrid.initialize) == parameters(deepspeed.initialize)


def test_entries_are_of_different_sources() -> None:
    assert len({expected for _, expected in SOURCES.values()}) == len(SOURCES)


def digest(function: Any) -> str:
    return hashlib.sha256(inspect.getsource(written(function)).encode()).hexdigest()[:16]


def written(function: Any) -> Any:
    """The function inside DeepSpeed's ``instrument_w_nvtx``, which wraps all in one source."""
    if function.__qualname__.endswith("<locals>.wrapped_fn"):
        return inspect.getclosurevars(function).nonlocals["func"]
    return function
