"""The "ds_hybrid" section of a ds_config, and the one way to load it: a checked HybridConfig, or every problem."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict

from ds_hybrid.document import (
    count_at,
    deepspeed_problems,
    deepspeed_warnings,
    experts_are_parallel,
    unresolved_problems,
)
from ds_hybrid.document import read_document as read_document  # for those who load: the rest of the file
from ds_hybrid.errors import ConfigError
from ds_hybrid.problems import ABSENT, Problem, listed, model_problems, show, value_at

Ranks = Annotated[tuple[int, ...], Strict(False)]  # not strict: JSON has lists where Python wants a tuple


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class DispatchConfig(_Section):
    """How tokens travel to their experts and back."""

    mode: Literal["auto", "alltoall", "allgather", "two_stage", "hierarchical", "replicated"] = Field(
        default="auto", description="The dispatcher; auto chooses one for each layer, by measured routing and links."
    )
    wire_dtype: Literal["auto", "bf16", "fp8_e4m3"] = Field(
        default="auto",
        description="What a value is on its way to the experts; auto sends the dtype of the tokens. Forward only.",
    )
    overlap_chunks: int = Field(
        default=1,
        ge=1,
        description="Parts that the tokens are cut into, one travelling while another computes; 1 is off.",
    )
    guard: bool = Field(default=True, description="Check that all ranks agree before they exchange tokens.")


class TopologyConfig(_Section):
    """What the machines look like, and which ranks form expert groups."""

    source: str = Field(
        default="auto", description="auto probes the running ranks; else the path of a machine description."
    )
    expert_groups: Literal["auto"] | Annotated[tuple[Ranks, ...], Strict(False)] = Field(
        default="auto", description="auto, or the ranks of each expert group, such as [[0,1,4,5],[2,3,6,7]]."
    )
    timeout_seconds: int | None = Field(
        default=None,
        ge=1,
        description="How long a rank of a built engine waits for others, then the run ends; null: torch's own limit.",
    )


class RebalanceConfig(_Section):
    """Experts move between ranks during training, without changing the result."""

    enabled: bool = Field(default=False, description="Move experts when it pays.")
    algorithm: Literal["swap", "lpt_swap", "lpt", "hierarchical", "article_round_robin", "static"] = Field(
        default="swap", description="How a new placement is found."
    )
    interval: int = Field(default=50, ge=1, description="Optimizer steps between two decisions.")
    threshold: float | None = Field(
        default=None,
        gt=1,
        description="A layer is looked at before its interval is over when its busiest rank is forecast to get this "
        "many times what is possible at best; null: never before.",
    )
    load_half_life: float = Field(default=50, gt=0, description="Optimizer steps after which a load counts half.")
    horizon: int = Field(default=200, ge=1, description="Optimizer steps over which a move must earn its cost back.")
    min_gain: float = Field(
        default=0.02,
        ge=0,
        description="A layer's experts move only when the forecast load of its busiest rank falls by this much, as a "
        "fraction of the ranks' mean.",
    )
    dry_run: bool = Field(default=False, description="Decide and report, but move nothing.")


class AttentionConfig(_Section):
    """Attention over a sequence that several ranks share."""

    kv_gather: Literal["off", "whole", "blocks", "ring", "auto"] = Field(
        default="off", description="How keys and values are gathered under compute; auto picks by sizes and links."
    )
    wire_dtype: Literal["auto", "bf16", "fp8_e4m3"] = Field(
        default="auto",
        description="What a key or value is on its way to other ranks; auto sends its own dtype. Gradients stay whole.",
    )
    memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="What keys, values and gradients of other ranks may take in a layer, in bytes; what is left of it "
        "keeps some for backward. null: no limit, and none kept.",
    )


class ObserveConfig(_Section):
    """What a run writes down about itself."""

    directory: str | None = Field(
        default=None, min_length=1, description="Where rank 0 writes events as JSON lines; null writes none."
    )
    interval: int = Field(
        default=10, ge=1, description="Optimizer steps between two events, in the directory and in monitors."
    )
    timeline: bool = Field(
        default=True,
        description="Also write what every rank did when in the last step of each interval; after 100 intervals, in "
        "that of each tenth, and so on.",
    )
    routing_trace: bool = Field(
        default=False, description="Also write how many tokens each expert got, for each step and layer."
    )


class HybridConfig(_Section):
    """The "ds_hybrid" section. Every key has a default, so an empty section is complete."""

    dispatch: DispatchConfig = DispatchConfig()
    topology: TopologyConfig = TopologyConfig()
    rebalance: RebalanceConfig = RebalanceConfig()
    attention: AttentionConfig = AttentionConfig()
    observe: ObserveConfig = ObserveConfig()
    plan: dict[str, Any] | None = Field(
        default=None, description="What the planner wrote down about its choice. launch/train.py reads plan.needs."
    )


_KV_GATHER: Final = "ds_hybrid.attention.kv_gather"

# The tables below name the values that work; every other value is refused. A feature arrives by deleting its row.
_Values = Mapping[str, tuple[Any, ...]]

NOT_YET: Final[_Values] = MappingProxyType(
    {
        "hybrid_engine.enabled": (False,),
    }
)
"""Values that work with everything."""

NOT_YET_WITH_EXPERT_PARALLEL: Final[_Values] = MappingProxyType(
    {
        "zero_optimization.elastic_checkpoint": (False,),
        "expert_parallel.expert_tensor_parallel_size": (1,),
        "expert_parallel.load_balance_coeff": (None,),
        "expert_parallel.score_apply": ("auto", "post"),
    }
)
"""The same for DeepSpeed's keys, when ``expert_parallel`` is enabled."""

NOT_WITH_REBALANCE: Final[_Values] = MappingProxyType(
    {
        "zero_optimization.offload_optimizer.device": ("cpu", "none", None),
        "zero_optimization.offload_param.device": ("cpu", "none", None),
        "zero_optimization.zero_hpz_partition_size": (1,),
        "zero_optimization.zero_quantized_weights": (False,),
        "zero_optimization.zero_quantized_nontrainable_weights": (False,),
        "zero_optimization.mics_shard_size": (-1,),
        "zero_optimization.zenflow": (None,),
        "zero_optimization.offload_optimizer.super_offload": (False,),
    }
)
"""The same for DeepSpeed's keys, when ``ds_hybrid.rebalance`` is enabled."""

NOT_WITH_KV_GATHER: Final[_Values] = MappingProxyType(
    {
        "tensor_parallel.autotp_size": (0, 1),
        "compile.deepcompile": (False,),
        "compile.autoep_non_moe": (False,),
        "zero_optimization.mics_shard_size": (-1,),
        "zero_optimization.zero_hpz_partition_size": (1,),
        "zero_optimization.zero_quantized_gradients": (False,),
    }
)
"""The same for DeepSpeed's keys, when ``ds_hybrid.attention.kv_gather`` is on."""

REPLACED: Final[_Values] = MappingProxyType(
    {
        "expert_parallel.combine_impl": ("auto", "weighted_sum"),
        "expert_parallel.row_weighting_impl": ("auto", "eager"),
        "expert_parallel.comm_backend": ("comm",),
        "expert_parallel.async_split_plan": (False,),
        "expert_parallel.validate_folding_routing": (False,),
    }
)
"""Options of AutoEP's own dispatch, which ds_hybrid's dispatchers replace: other values are warned of."""


def load(
    source: str | Path | Mapping[str, Any],
    *,
    world_size: int | None = None,
    num_experts: int | None = None,
    allow_auto: bool = True,
) -> HybridConfig:
    """The checked "ds_hybrid" section of a ds_config; all defaults when the file has none.

    Args:
        source: path of the file, or the ds_config as a mapping.
        world_size: ranks of the run. Without it, rules that need it are not checked.
        num_experts: experts of each MoE layer. Without it, rules that need it are not checked.
        allow_auto: accept "auto" where Hugging Face's Trainer fills in its own value later.

    Raises:
        ConfigError: with one line for each problem of the whole file.
    """
    return check(
        read_document(source),
        name=name_of(source),
        world_size=world_size,
        num_experts=num_experts,
        allow_auto=allow_auto,
    )


def name_of(source: str | Path | Mapping[str, Any]) -> str:
    """How messages call a ds_config."""
    return "ds_config" if isinstance(source, Mapping) else str(source)


def check(
    document: Mapping[str, Any],
    *,
    name: str,
    world_size: int | None = None,
    num_experts: int | None = None,
    allow_auto: bool = True,
) -> HybridConfig:
    """As :func:`load`, of a ds_config that has been read; ``name`` is how to call it."""
    problems = find_problems(document, name=name, world_size=world_size, num_experts=num_experts)
    if not allow_auto:
        problems += [problem.line(name) for problem in unresolved_problems(document)]
    if problems:
        raise ConfigError(*problems)
    return HybridConfig.model_validate(document.get("ds_hybrid", {}))


def find_problems(
    document: Mapping[str, Any], *, name: str, world_size: int | None = None, num_experts: int | None = None
) -> list[str]:
    """Every problem of a ds_config, one line each: place, value, file, rule, fix. ``name`` is how to call the file."""
    for argument, value in (("world_size", world_size), ("num_experts", num_experts)):
        if value is not None and value < 1:
            return [Problem(argument, "must be an integer >= 1.", value).line(name)]
    broken_models = model_problems(HybridConfig, document.get("ds_hybrid", {}), at="ds_hybrid")
    problems = [
        *deepspeed_problems(document, world_size=world_size, num_experts=num_experts),
        *broken_models,
        *_limit_problems(document, already={problem.path for problem in broken_models}),
        *_expert_group_problems(document, world_size),
        *_replicated_problems(document),
        *_tensor_parallel_problems(document),
        *_rebalance_problems(document),
        *_sequence_problems(document, world_size),
        *_observe_problems(document),
        *_universal_problems(document),
    ]
    return [problem.line(name) for problem in problems]


def find_warnings(document: Mapping[str, Any], *, name: str) -> list[str]:
    """What a ds_config says or leaves out in vain, one line each; nothing here stops a run."""
    problems = deepspeed_warnings(document)
    if experts_are_parallel(document):
        rule = "has no effect with ds_hybrid's dispatchers. Remove it."
        problems += [Problem(path, rule, value) for path, value, _ in _refused(document, REPLACED)]
    return [problem.line(name) for problem in problems]


def broken_partition(groups: Sequence[Sequence[int]], *, world_size: int | None, group_size: int | None) -> list[str]:
    """The rules that ``groups`` break as a partition of the ranks into groups of one size.

    ``world_size`` None takes the ranks that the groups hold together; ``group_size`` None takes any size.
    """
    if not groups or not all(groups):
        return ["must hold at least one group, and no empty one."]
    broken = []
    sizes = sorted({len(group) for group in groups})
    if len(sizes) > 1:
        broken.append(f"groups must have one size, not {', '.join(map(str, sizes))}.")
    elif group_size is not None and sizes != [group_size]:
        broken.append(f"groups must hold expert_parallel.autoep_size {group_size} ranks, not {sizes[0]}.")
    counts = Counter(rank for group in groups for rank in group)
    world = range(world_size if world_size is not None else sum(counts.values()))
    faults = {
        "missing": [rank for rank in world if rank not in counts],
        "given twice": [rank for rank, count in counts.items() if count > 1],
        "outside": [rank for rank in counts if rank not in world],
    }
    named = "; ".join(f"{fault} {', '.join(map(str, ranks))}" for fault, ranks in faults.items() if ranks)
    if named:
        broken.append(f"must hold each rank from 0 to {len(world) - 1} once: {named}.")
    return broken


def _expert_group_problems(document: Mapping[str, Any], world_size: int | None) -> Iterator[Problem]:
    path = "ds_hybrid.topology.expert_groups"
    groups = value_at(document, path)
    if groups in (ABSENT, "auto") or model_problems(TopologyConfig, {"expert_groups": groups}):
        return
    group_size = count_at(document, "expert_parallel.autoep_size")
    for rule in broken_partition(groups, world_size=world_size, group_size=group_size):
        yield Problem(path, rule, groups)


def _replicated_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    path = "ds_hybrid.dispatch.mode"
    if value_at(document, path) != "replicated":
        return
    tp_size = count_at(document, "tensor_parallel.autotp_size") or 1
    ep_size = count_at(document, "expert_parallel.autoep_size") or 1
    if not experts_are_parallel(document) or tp_size != ep_size or tp_size == 1:
        rule = (
            "needs the same tokens on all ranks of an expert-parallel group: tensor_parallel.autotp_size and "
            f"expert_parallel.autoep_size must be one size of at least 2, not {tp_size} and {ep_size}, and "
            'expert_parallel.enabled true. Set them so, or the mode to "two_stage".'
        )
        yield Problem(path, rule, "replicated")


def _tensor_parallel_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    """What tensor parallelism needs with ``expert_parallel``; DeepSpeed reports some of it when the model is built."""
    tp_size = count_at(document, "tensor_parallel.autotp_size") or 1
    if tp_size == 1 or not experts_are_parallel(document):
        return
    beside = f"with expert_parallel and tensor_parallel.autotp_size {tp_size}"
    ep_size = value_at(document, "expert_parallel.autoep_size")
    if ep_size in (ABSENT, 1):
        yield Problem("expert_parallel.autoep_size", f"must be at least 2 {beside}. Set it to {tp_size}.", ep_size)
    elif isinstance(ep_size, int) and ep_size % tp_size and tp_size % ep_size:
        works = [size for size in range(2, 4 * tp_size + 1) if not size % tp_size or not tp_size % size]
        rule = f"must divide autotp_size {tp_size} or be a multiple of it. Values that work: {listed(works)}, ..."
        yield Problem("expert_parallel.autoep_size", rule, ep_size)
    given = (value_at(document, f"tensor_parallel.{key}") for key in ("partition_config", "preset_model"))
    if all(value in (ABSENT, None) for value in given):
        plan = "ds_configs/plan_a_zero1_bf16.json"
        rule = f"missing {beside}: DeepSpeed refuses the plans that come with MoE models. Copy the one of {plan}."
        yield Problem("tensor_parallel.partition_config", rule)
    stage = value_at(document, "zero_optimization.stage")
    half = any(value_at(document, f"{dtype}.enabled") is True for dtype in ("bf16", "bfloat16", "fp16"))
    if stage in (ABSENT, 0) and half and value_at(document, "gradient_clipping") != 0:
        rule = f"DeepSpeed clips by a wrong norm in half precision {beside}. Set it to 1, 2 or 3."
        yield Problem("zero_optimization.stage", rule, stage)


def _observe_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    observe = value_at(document, "ds_hybrid.observe")
    if isinstance(observe, Mapping) and observe.get("routing_trace") is True and observe.get("directory") is None:
        rule = 'needs ds_hybrid.observe.directory. Set that to a directory such as "runs/1", or this to false.'
        yield Problem("ds_hybrid.observe.routing_trace", rule, True)


def _rebalance_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Where weights or their states lie that experts cannot take along."""
    if value_at(document, "ds_hybrid.rebalance.enabled") is not True:
        return
    for path, value, works in _refused(document, NOT_WITH_REBALANCE):
        rule = f"experts cannot move with it. Set it to {listed(works)}, or ds_hybrid.rebalance.enabled to false."
        yield Problem(path, rule, value)


def gathers_kv(document: Mapping[str, Any]) -> bool:
    """Whether ds_hybrid shares sequences out over ranks; else ``sequence_parallel_size`` is DeepSpeed's business."""
    return value_at(document, _KV_GATHER) in ("whole", "blocks", "ring", "auto")


def _sequence_problems(document: Mapping[str, Any], world_size: int | None) -> Iterator[Problem]:
    """What attention over sequences that several ranks share needs."""
    if not gathers_kv(document):
        return
    mode = value_at(document, _KV_GATHER)
    size = value_at(document, "sequence_parallel_size")
    if size in (ABSENT, 1):
        rule = (
            "nothing to gather: sequence_parallel_size is 1. Set that to the number of ranks that share a sequence, or "
            f'{_KV_GATHER} to "off".'
        )
        yield Problem(_KV_GATHER, rule, mode)
    for path, value, works in _refused(document, NOT_WITH_KV_GATHER):
        rule = f'not available with {_KV_GATHER} {show(mode)}. Set it to {listed(works)}, or {_KV_GATHER} to "off".'
        yield Problem(path, rule, value)
    num_replicas = value_at(document, "data_parallel_size")
    shared_by = count_at(document, "sequence_parallel_size") or 1
    if num_replicas is ABSENT or world_size is None or world_size % shared_by:
        return
    size = world_size // shared_by
    if num_replicas != size:
        rule = f"must be world_size {world_size} / sequence_parallel_size {shared_by}. Remove it, or set it to {size}."
        yield Problem("data_parallel_size", rule, num_replicas)


def _universal_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    path = "zero_optimization.round_robin_gradients"
    if value_at(document, path) is True and value_at(document, "checkpoint.load_universal") is True:
        rule = "DeepSpeed 0.19.8 loads universal checkpoints to wrong places with it. Set it to false for this run."
        yield Problem(path, rule, True)


def _limit_problems(document: Mapping[str, Any], already: set[str]) -> Iterator[Problem]:
    """Values that the models allow and this version refuses; ``already`` are the paths reported before."""
    for path, value, works in _refused(document, NOT_YET):
        if path not in already:
            yield Problem(path, f"not available in {_release()}. Set it to {listed(works)}.", value)
    if not experts_are_parallel(document):
        return
    for path, value, works in _refused(document, NOT_YET_WITH_EXPERT_PARALLEL):
        rule = f"not available in {_release()} with expert_parallel. Set it to {listed(works)}."
        yield Problem(path, rule, value)


def _release() -> str:
    return f"ds_hybrid {version('ds_hybrid')}"


def _refused(document: Mapping[str, Any], table: _Values) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    for path, works in table.items():
        value = value_at(document, path)
        if value is not ABSENT and value not in works:
            yield path, value, works
