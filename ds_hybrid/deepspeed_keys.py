"""The keys of a ds_config that DeepSpeed reads, written down because DeepSpeed ignores a key it does not know.

``tests/test_deepspeed_keys.py`` compares these tables with the installed DeepSpeed.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

VERSION: Final = "0.19.8"
"""The DeepSpeed that these tables describe."""

TOP_LEVEL: Final = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "allgather_size",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "csv_monitor",
        "data_efficiency",
        "data_parallel_size",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "expert_parallel",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "optimizer",
        "pipeline",
        "prescale_gradients",
        "scheduler",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)
"""Every key that DeepSpeed looks up at the top of the file, older spellings included."""

REMOVED: Final = frozenset(
    {
        "amp",
        "compression_training",
        "curriculum_learning",
        "eigenvalue",
        "elasticity",
        "graph_harvesting",
        "nebula",
        "progressive_layer_drop",
        "quantize_training",
        "sparse_attention",
        "sparse_gradients",
    }
)
"""Top-level keys of older versions. DeepSpeed refuses a file that has one of them."""

_BF16: Final = frozenset(
    {
        "bf16_master_weights_and_grads",
        "bf16_optimizer_states",
        "check_grad_overflow",
        "enabled",
        "immediate_grad_update",
    }
)

SECTIONS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "bf16": _BF16,
        "bfloat16": _BF16,
        "expert_parallel": frozenset(
            {
                "async_split_plan",
                "autoep_size",
                "combine_impl",
                "comm_backend",
                "comm_max_tokens_per_rank",
                "comm_num_sm",
                "comm_qp_margin",
                "disable_triton_grouped_mm",
                "enabled",
                "expert_activation",
                "expert_pattern",
                "expert_tensor_parallel_size",
                "expert_w1",
                "expert_w2",
                "expert_w3",
                "gate_up_impl",
                "has_shared_experts",
                "load_balance_coeff",
                "moe_layer_pattern",
                "num_expert_groups",
                "num_experts_attr",
                "num_limited_groups",
                "preset_model",
                "route_norm",
                "route_scale",
                "routed_scaling_factor",
                "router_pattern",
                "row_weighting_impl",
                "score_apply",
                "score_func",
                "shared_experts_gate_pattern",
                "shared_experts_pattern",
                "top_k",
                "top_k_attr",
                "use_grouped_mm",
                "validate_folding_routing",
            }
        ),
        "fp16": frozenset(
            {
                "auto_cast",
                "consecutive_hysteresis",
                "enabled",
                "fp16_master_weights_and_grads",
                "hysteresis",
                "initial_scale_power",
                "loss_scale",
                "loss_scale_window",
                "min_loss_scale",
            }
        ),
        "optimizer": frozenset({"legacy_fusion", "params", "type"}),
        "scheduler": frozenset({"params", "type"}),
        "tensor_parallel": frozenset(
            {
                "autotp_size",
                "dtype",
                "injection_policy_tuple",
                "keep_module_on_host",
                "kernel_inject",
                "partition_config",
                "preset_model",
                "replace_with_kernel_inject",
                "tensor_parallel",
                "tp",
                "tp_overlap_comm",
                "vocab_parallel_ce_backend",
                "vocab_parallel_lm_head",
            }
        ),
        "zero_optimization": frozenset(
            {
                "allgather_bucket_size",
                "allgather_partitions",
                "allgather_sequential",
                "compute_grad_norm",
                "contiguous_gradients",
                "cpu_offload",
                "cpu_offload_param",
                "cpu_offload_use_pin_memory",
                "elastic_checkpoint",
                "enable_sanity_checks",
                "gather_16bit_weights_on_model_save",
                "ignore_unused_parameters",
                "leaf_module",
                "legacy_stage1",
                "load_from_fp32_weights",
                "log_trace_cache_warnings",
                "max_live_parameters",
                "max_reuse_distance",
                "memory_efficient_linear",
                "model_persistence_threshold",
                "module_granularity_threshold",
                "offload_optimizer",
                "offload_param",
                "overlap_comm",
                "override_module_apply",
                "param_persistence_threshold",
                "parameter_alignment",
                "pipeline_loading_checkpoint",
                "prefetch_bucket_size",
                "reduce_bucket_size",
                "reduce_scatter",
                "round_robin_gradients",
                "save_muon_momentum_buffer_in_memory",
                "stage",
                "stage3_allgather_sequential",
                "stage3_gather_16bit_weights_on_model_save",
                "stage3_gather_fp16_weights_on_model_save",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "stage3_model_persistence_threshold",
                "stage3_module_granularity_threshold",
                "stage3_param_persistence_threshold",
                "stage3_prefetch_bucket_size",
                "stage3_use_all_reduce_for_fetch_params",
                "sub_group_size",
                "use_all_reduce_for_fetch_params",
                "use_multi_rank_bucket_allreduce",
                "zenflow",
                "zero_hpz_partition_size",
                "zero_quantized_gradients",
                "zero_quantized_nontrainable_weights",
                "zero_quantized_weights",
            }
        ),
    }
)
"""Every key, aliases and deprecated ones included, of the sections whose keys are checked too."""
