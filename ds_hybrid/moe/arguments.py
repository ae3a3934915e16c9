"""The rules that the arguments of ``ds_hybrid.MoE`` obey, all checked at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from ds_hybrid.config import DispatchConfig
from ds_hybrid.dispatch.modes import MODES
from ds_hybrid.errors import ConfigError
from ds_hybrid.moe.capacity import DROP_POLICIES
from ds_hybrid.moe.router import SCORE_FUNCTIONS, Noise
from ds_hybrid.problems import did_you_mean, listed, show

NOISE_OF_POLICY: Final[Mapping[str | None, Noise]] = MappingProxyType(
    {None: "none", "None": "none", "Jitter": "jitter", "RSample": "gumbel"}
)
"""DeepSpeed's noisy_gate_policy -> ours."""

_WORKING_MODES: Final = ("auto", *MODES, "hierarchical")

_UNSUPPORTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "use_tutel": "Tutel's kernels serve DeepSpeed's own dispatch. Leave it False: dispatch= chooses ours.",
        "enable_expert_tensor_parallelism": "experts are not split over tensor-parallel ranks. Leave it False.",
    }
)


def check_arguments(**arguments: Any) -> None:
    """Check the arguments of ``ds_hybrid.MoE``, given by name.

    Raises:
        ConfigError: one line for each broken rule: the argument, its value, the rule and the fix.
    """
    problems = [f"ds_hybrid.MoE({name}={arguments[name]!r}): {rule}" for name, rule in _broken_rules(arguments)]
    if problems:
        raise ConfigError(*problems)


def check_dispatch(dispatch: DispatchConfig, *, layer: str) -> None:
    """Check that a ds_config's dispatcher is one that ``ds_hybrid.MoE`` takes.

    Raises:
        ConfigError: it is one that only converted layers take.
    """
    works = _WORKING_MODES
    if dispatch.mode not in works:
        raise ConfigError(
            f"ds_hybrid.dispatch.mode = {show(dispatch.mode)}: not available for the ds_hybrid.MoE {layer!r}. "
            f"Set it to {listed(works)}."
        )


def check_world_size(world_size: int, *, num_experts: int, ep_size: int) -> None:
    """Check that expert-parallel groups of ``ep_size`` ranks fill the world.

    Raises:
        ConfigError: naming the values that work.
    """
    if world_size % ep_size:
        values = _divisors(math.gcd(world_size, num_experts))
        raise ConfigError(
            f"ds_hybrid.MoE(ep_size={ep_size}): must divide the world size {world_size} "
            f"and num_experts = {num_experts}. Values that work: {values}."
        )


def _broken_rules(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    num_experts, ep_size, k = given["num_experts"], given["ep_size"], given["k"]
    if num_experts < 1:
        yield "num_experts", "must be at least 1."
        return
    if ep_size < 1 or num_experts % ep_size:
        yield "ep_size", f"must divide num_experts = {num_experts}. Values that work: {_divisors(num_experts)}."
    if not 1 <= k <= num_experts:
        yield "k", f"must be from 1 to num_experts = {num_experts}."
    for name, advice in _UNSUPPORTED.items():
        if given[name]:
            yield name, f"not supported: {advice}"
    if given["top2_2nd_expert_sampling"] and given["noisy_gate_policy"] not in (None, "None"):
        yield "noisy_gate_policy", "does not combine with top2_2nd_expert_sampling=True. Choose one of them."
    yield from _unknown_words(given)
    for name in ("capacity_factor", "eval_capacity_factor"):
        if given[name] <= 0:
            yield name, "must be above 0."
    for name in ("min_capacity", "z_loss_weight", "bias_update_rate"):
        if given[name] < 0:
            yield name, "must not be negative."
    yield from _broken_group_rules(num_experts, k, given["num_groups"], given["topk_groups"])


def _unknown_words(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    vocabulary: dict[str, Iterable[Any]] = {
        "noisy_gate_policy": NOISE_OF_POLICY,
        "dispatch": _WORKING_MODES,
        "drop_policy": DROP_POLICIES,
        "score": SCORE_FUNCTIONS,
    }
    for name, words in vocabulary.items():
        if given[name] not in words:
            hint = did_you_mean(str(given[name]), [word for word in words if word is not None])
            yield name, f"must be {listed(words)}.{hint}"


def _broken_group_rules(num_experts: int, k: int, num_groups: int, topk_groups: int) -> Iterator[tuple[str, str]]:
    if num_groups < 1 or num_experts % num_groups:
        yield "num_groups", f"must divide num_experts = {num_experts}. Values that work: {_divisors(num_experts)}."
    elif not 1 <= topk_groups <= num_groups:
        yield "topk_groups", f"must be from 1 to num_groups = {num_groups}."
    elif topk_groups * (num_experts // num_groups) < k <= num_experts:
        reachable = topk_groups * (num_experts // num_groups)
        yield "topk_groups", f"{topk_groups} groups hold {reachable} experts, fewer than k = {k}. Raise it or lower k."


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
