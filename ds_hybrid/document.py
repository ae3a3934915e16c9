"""A whole ds_config: reading the file, and checking the part that DeepSpeed owns.

Here belongs what DeepSpeed itself would let pass or report late: typos, which it ignores, and sizes that do not
multiply. Checks take the document as read and give Problems, so that one run names them all.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import gcd, prod
from pathlib import Path
from typing import Annotated, Any, Literal

import hjson
from pydantic import BaseModel, ConfigDict, Field

from ds_hybrid import deepspeed_keys
from ds_hybrid.errors import ConfigError
from ds_hybrid.problems import Problem, model_problems, read_text, unknown_key, value_at

OUR_KEYS = frozenset({"$schema", "ds_hybrid"})
"""The top-level keys that are not DeepSpeed's."""

Auto = Literal["auto"]  # what Hugging Face's Trainer replaces with its own value
Count = Annotated[int, Field(ge=1)]
Size = Annotated[float, Field(ge=0)]  # elements; a number because files write 5e8
Norm = Annotated[float, Field(ge=0)]


class _Known(BaseModel):
    """Keys whose type is checked; ``deepspeed_keys`` names them all. Which may be absent, and what then holds, is
    DeepSpeed's to say: the fields have no defaults."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Optimizer(_Known):
    type: str = Field(description="Name of the optimizer, such as AdamW.")
    params: dict[str, Any] = Field(description="Its arguments, such as lr.")


class Scheduler(_Known):
    type: str = Field(description="Name of the learning rate schedule, such as WarmupLR.")
    params: dict[str, Any] = Field(description="Its arguments.")


class Bf16(_Known):
    enabled: bool | Auto = Field(description="Train in bfloat16.")


class Fp16(_Known):
    enabled: bool | Auto = Field(description="Train in float16 with loss scaling.")
    loss_scale: float = Field(ge=0, description="Fixed loss scale; 0 adapts it.")


class Zero(_Known):
    stage: int = Field(
        ge=0, le=3, description="0 shards nothing, 1 optimizer states, 2 gradients too, 3 parameters too."
    )
    reduce_bucket_size: Size | Auto = Field(description="Elements reduced at a time.")
    allgather_bucket_size: Size = Field(description="Elements gathered at a time.")
    stage3_prefetch_bucket_size: Size | Auto = Field(description="Elements fetched ahead of use.")
    stage3_param_persistence_threshold: Size | Auto = Field(description="Smaller parameters (elements) stay whole.")


class ExpertParallel(_Known):
    enabled: bool = Field(description="Convert the model's MoE layers to expert parallelism (AutoEP).")
    autoep_size: Count = Field(description="Ranks that share the experts of a layer; 1 when absent.")


class TensorParallel(_Known):
    autotp_size: int = Field(ge=0, description="Ranks that share one copy of the dense weights; 0 is off.")


class DeepSpeedKeys(_Known):
    """The keys of DeepSpeed whose types ds_hybrid checks."""

    train_batch_size: Count | Auto = Field(description="Samples of one optimizer step, over all ranks.")
    train_micro_batch_size_per_gpu: Count | Auto = Field(description="Samples of one forward on one rank.")
    gradient_accumulation_steps: Count | Auto = Field(description="Micro-batches of one optimizer step.")
    gradient_clipping: Norm | Auto = Field(
        description="Largest gradient norm; 0.0 turns clipping off. When absent, DeepSpeed clips at 1.0."
    )
    steps_per_print: Annotated[float, Field(gt=0)] | None = Field(
        description="Optimizer steps between two lines of progress; null prints none."
    )
    sequence_parallel_size: Count = Field(description="Ranks that share one sequence.")
    wall_clock_breakdown: bool = Field(description="Log the time of forward, backward and step.")
    zero_allow_untested_optimizer: bool = Field(description="Let ZeRO run an optimizer it does not know.")
    optimizer: Optimizer
    scheduler: Scheduler
    bf16: Bf16
    bfloat16: Bf16 = Field(description="Older spelling of bf16.")
    fp16: Fp16
    zero_optimization: Zero
    expert_parallel: ExpertParallel
    tensor_parallel: TensorParallel


def read_document(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The ds_config at a path, strict JSON or Hjson (which adds comments), as DeepSpeed would parse it.

    A mapping is copied one level deep.

    Raises:
        ConfigError: the file is missing or unreadable, breaks the syntax, or has a key twice in one object.
    """
    if isinstance(source, Mapping):
        return dict(source)
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        repeated.extend(key for key, count in counts.items() if count > 1)
        return dict(pairs)

    try:
        document = hjson.loads(read_text(source, ConfigError), object_pairs_hook=unique)
    except hjson.HjsonDecodeError as error:
        reason = str(error).rpartition(": line ")[0]
        raise ConfigError(f"{source}: line {error.lineno}, column {error.colno}: {reason}.") from None
    if repeated:
        raise ConfigError(*(f"{key} ({source}): given twice in one object. Keep one." for key in repeated))
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: must hold one object, not a {type(document).__name__}.")
    return document


def deepspeed_problems(
    document: Mapping[str, Any], *, world_size: int | None = None, num_experts: int | None = None
) -> list[Problem]:
    """What is wrong with DeepSpeed's keys. Sizes are checked as far as the given numbers allow."""
    return [
        *_key_problems(document),
        *model_problems(DeepSpeedKeys, dict(document)),
        *_batch_problems(document, world_size),
        *_precision_problems(document),
        *_expert_parallel_problems(document, world_size, num_experts),
    ]


def deepspeed_warnings(document: Mapping[str, Any]) -> list[Problem]:
    """What DeepSpeed does without being asked to."""
    if "gradient_clipping" in document:
        return []
    rule = f"missing, and DeepSpeed {deepspeed_keys.VERSION} then clips at 1.0. Set it (0.0 turns clipping off)."
    return [Problem("gradient_clipping", rule)]


def unresolved_problems(document: Mapping[str, Any]) -> list[Problem]:
    """Values "auto" that Hugging Face's Trainer fills in and nobody has."""
    rule = "only Hugging Face's Trainer fills this in. Set a value."
    paths = [
        path
        for key, value in document.items()
        for path in ([key] if not isinstance(value, Mapping) else [f"{key}.{inner}" for inner in value])
        if key in deepspeed_keys.TOP_LEVEL - {"expert_parallel"}
    ]
    return [Problem(path, rule, "auto") for path in paths if value_at(document, path) == "auto"]


def experts_are_parallel(document: Mapping[str, Any]) -> bool:
    """Whether the file turns DeepSpeed's AutoEP on."""
    return value_at(document, "expert_parallel.enabled") is True


def count_at(document: Mapping[str, Any], path: str) -> int | None:
    """The positive integer at ``path``; None when the key is absent, "auto", or of a wrong type."""
    value = value_at(document, path)
    return value if type(value) is int and value >= 1 else None


def _key_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    top_level = deepspeed_keys.TOP_LEVEL | OUR_KEYS
    for key in document:
        if key in deepspeed_keys.REMOVED:
            yield Problem(key, f"DeepSpeed {deepspeed_keys.VERSION} has removed it and refuses the file. Remove it.")
        elif key not in top_level:
            yield unknown_key(key, top_level)
    for section, keys in deepspeed_keys.SECTIONS.items():
        body = document.get(section)
        if isinstance(body, Mapping):
            yield from (unknown_key(f"{section}.{key}", keys) for key in body if key not in keys)


def _batch_problems(document: Mapping[str, Any], world_size: int | None) -> Iterator[Problem]:
    if "train_batch_size" not in document and "train_micro_batch_size_per_gpu" not in document:
        yield Problem("train_micro_batch_size_per_gpu", "missing. Set it, or set train_batch_size.")
    factors = {
        key: count_at(document, key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    }
    if world_size is not None:
        shards = {
            key: count_at(document, key) or 1 for key in ("tensor_parallel.autotp_size", "sequence_parallel_size")
        }
        if world_size % prod(shards.values()):
            yield Problem("world_size", _multiple_of(shards, world_size), world_size)
            return
        # DeepSpeed's own sum: tensor parallelism does not divide it.
        factors["data-parallel size"] = world_size // shards["sequence_parallel_size"]
    total = count_at(document, "train_batch_size")
    known = {name: factor for name, factor in factors.items() if factor is not None}
    if total is None or not known:
        return
    product = prod(known.values())
    if len(known) == 3 and total != product:
        yield Problem("train_batch_size", f"must equal {_product(known)}. Set it to {product}.", total)
    elif total % product:
        yield Problem("train_batch_size", _multiple_of(known, total), total)


def _precision_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    bf16 = "bf16" if "bf16" in document else "bfloat16"
    if value_at(document, f"{bf16}.enabled") is True and value_at(document, "fp16.enabled") is True:
        yield Problem("fp16.enabled", f"{bf16}.enabled is true too. Set one of them to false.", True)


def _expert_parallel_problems(
    document: Mapping[str, Any], world_size: int | None, num_experts: int | None
) -> Iterator[Problem]:
    size = count_at(document, "expert_parallel.autoep_size")
    wholes = {"world_size": world_size, "num_experts": num_experts}
    known = {name: whole for name, whole in wholes.items() if whole is not None}
    if not experts_are_parallel(document) or size is None or all(whole % size == 0 for whole in known.values()):
        return
    common = gcd(*known.values())
    works = ", ".join(str(divisor) for divisor in range(1, common + 1) if common % divisor == 0)
    must_divide = " and ".join(f"{name} {whole}" for name, whole in known.items())
    yield Problem("expert_parallel.autoep_size", f"must divide {must_divide}. Values that work: {works}.", size)


def _product(factors: Mapping[str, int]) -> str:
    terms = " x ".join(f"{name} {factor}" for name, factor in factors.items())
    return terms if len(factors) == 1 else f"{terms} = {prod(factors.values())}"


def _multiple_of(factors: Mapping[str, int], value: int) -> str:
    step = prod(factors.values())
    below = value // step * step
    works = f"{below} or {below + step}" if below else f"{step}"
    return f"must be a multiple of {_product(factors)}. Set it to {works}."
