"""The "ds_hybrid" section: its defaults, a table of wrong sections with the message of each, and load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import ds_hybrid
from ds_hybrid.config import (
    NOT_YET,
    HybridConfig,
    broken_partition,
    find_problems,
    find_warnings,
    gathers_kv,
    load,
)
from ds_hybrid.errors import ConfigError
from ds_hybrid.problems import value_at

GOOD: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
RELEASE = f"ds_hybrid {ds_hybrid.__version__}"

NOTHING_TO_GATHER = (
    'ds_hybrid.attention.kv_gather = "{}" (x.json): nothing to gather: sequence_parallel_size is 1. Set that to the '
    'number of ranks that share a sequence, or ds_hybrid.attention.kv_gather to "off".'
)

DESIGN_SECTION = """{
  "dispatch":  {"mode": "auto", "wire_dtype": "auto", "overlap_chunks": 1, "guard": true},
  "topology":  {"source": "auto", "expert_groups": "auto", "timeout_seconds": null},
  "rebalance": {"enabled": false, "algorithm": "swap", "interval": 50, "threshold": null, "load_half_life": 50,
                "horizon": 200, "min_gain": 0.02, "dry_run": false},
  "attention": {"kv_gather": "off", "wire_dtype": "auto", "memory_bytes": null},
  "observe":   {"directory": null, "interval": 10, "timeline": true, "routing_trace": false}
}"""


def test_defaults_are_those_of_the_design() -> None:
    assert HybridConfig().model_dump(exclude={"plan"}) == json.loads(DESIGN_SECTION)
    assert load(GOOD) == HybridConfig()
    assert load({**GOOD, "ds_hybrid": json.loads(DESIGN_SECTION)}) == HybridConfig()


def test_section_is_read_and_frozen() -> None:
    config = load({**GOOD, "ds_hybrid": {"dispatch": {"mode": "two_stage"}, "plan": {"why": ["fits", 3]}}})
    assert (config.dispatch.mode, config.plan) == ("two_stage", {"why": ["fits", 3]})
    with pytest.raises(ValidationError):
        config.dispatch.mode = "auto"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"dispatch": {"mode": "allgatther"}},
            'ds_hybrid.dispatch.mode = "allgatther" (x.json): must be one of auto, alltoall, allgather, two_stage, '
            'hierarchical, replicated. Did you mean "allgather"?',
        ),
        (
            {"dispatch": {"wire_dtype": "fp8"}},
            'ds_hybrid.dispatch.wire_dtype = "fp8" (x.json): must be one of auto, bf16, fp8_e4m3.',
        ),
        (
            {"dispatch": {"overlap_chunks": 0}},
            "ds_hybrid.dispatch.overlap_chunks = 0 (x.json): must be an integer >= 1.",
        ),
        (
            {"dispatch": {"overlap_chunks": True}},
            "ds_hybrid.dispatch.overlap_chunks = true (x.json): must be an integer >= 1.",
        ),
        ({"dispatch": {"guard": "yes"}}, 'ds_hybrid.dispatch.guard = "yes" (x.json): must be true or false.'),
        ({"dispatch": {"gaurd": True}}, 'ds_hybrid.dispatch.gaurd (x.json): unknown key. Did you mean "guard"?'),
        ({"dispatch": "two_stage"}, 'ds_hybrid.dispatch = "two_stage" (x.json): must be an object.'),
        ({"dispach": {}}, 'ds_hybrid.dispach (x.json): unknown key. Did you mean "dispatch"?'),
        ([], "ds_hybrid = [] (x.json): must be an object."),
        ({"topology": {"source": 3}}, "ds_hybrid.topology.source = 3 (x.json): must be a string."),
        (
            {"topology": {"expert_groups": [[0, "1"]]}},
            'ds_hybrid.topology.expert_groups = [[0, "1"]] (x.json): must be "auto" or a list of lists of integers.',
        ),
        ({"rebalance": {"enabled": 0}}, "ds_hybrid.rebalance.enabled = 0 (x.json): must be true or false."),
        (
            {"rebalance": {"algorithm": "Swap"}},
            'ds_hybrid.rebalance.algorithm = "Swap" (x.json): must be one of swap, lpt_swap, lpt, hierarchical, '
            'article_round_robin, static. Did you mean "swap"?',
        ),
        ({"rebalance": {"interval": 0}}, "ds_hybrid.rebalance.interval = 0 (x.json): must be an integer >= 1."),
        (
            {"rebalance": {"load_half_life": 0}},
            "ds_hybrid.rebalance.load_half_life = 0 (x.json): must be a number > 0.",
        ),
        ({"rebalance": {"horizon": 1.5}}, "ds_hybrid.rebalance.horizon = 1.5 (x.json): must be an integer >= 1."),
        ({"rebalance": {"min_gain": -1}}, "ds_hybrid.rebalance.min_gain = -1 (x.json): must be a number >= 0."),
        (
            {"attention": {"kv_gather": "on"}},
            'ds_hybrid.attention.kv_gather = "on" (x.json): must be one of off, whole, blocks, ring, auto.',
        ),
        ({"observe": {"directory": 3}}, "ds_hybrid.observe.directory = 3 (x.json): must be a string or null."),
        ({"observe": {"interval": "10"}}, 'ds_hybrid.observe.interval = "10" (x.json): must be an integer >= 1.'),
        ({"plan": "auto"}, 'ds_hybrid.plan = "auto" (x.json): must be an object or null.'),
        ({"rebalance": {"threshold": 1}}, "ds_hybrid.rebalance.threshold = 1 (x.json): must be a number > 1 or null."),
        (
            {"attention": {"wire_dtype": "fp16"}},
            'ds_hybrid.attention.wire_dtype = "fp16" (x.json): must be one of auto, bf16, fp8_e4m3. '
            'Did you mean "bf16"?',
        ),
        (
            {"attention": {"memory_bytes": 0}},
            "ds_hybrid.attention.memory_bytes = 0 (x.json): must be an integer >= 1 or null.",
        ),
        ({"attention": {"kv_gather": "ring"}}, NOTHING_TO_GATHER.format("ring")),
        (
            {"observe": {"routing_trace": True}},
            "ds_hybrid.observe.routing_trace = true (x.json): needs ds_hybrid.observe.directory. Set that to a "
            'directory such as "runs/1", or this to false.',
        ),
        (
            {"observe": {"directory": ""}},
            'ds_hybrid.observe.directory = "" (x.json): must be a string or null.',
        ),
    ],
)
def test_wrong_section(section: Any, message: str) -> None:
    assert find_problems({**GOOD, "ds_hybrid": section}, name="x.json") == [message]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"expert_parallel": {"score_apply": "pre"}},
            f'expert_parallel.score_apply = "pre" (x.json): not available in {RELEASE} with expert_parallel. '
            'Set it to "auto" or "post".',
        ),
        (
            {"expert_parallel": {"expert_tensor_parallel_size": 2}},
            f"expert_parallel.expert_tensor_parallel_size = 2 (x.json): not available in {RELEASE} with "
            "expert_parallel. Set it to 1.",
        ),
        (
            {"expert_parallel": {"load_balance_coeff": 0.1}},
            f"expert_parallel.load_balance_coeff = 0.1 (x.json): not available in {RELEASE} with expert_parallel. "
            "Set it to null.",
        ),
    ],
)
def test_refused_only_with_expert_parallel(change: dict[str, Any], message: str) -> None:
    document = {**GOOD, **change}
    assert find_problems(document, name="x.json") == []
    document["expert_parallel"] = {"enabled": True, **change.get("expert_parallel", {})}
    assert find_problems(document, name="x.json") == [message]


@pytest.mark.parametrize(
    ("tp_size", "ep_size", "enabled"), [(1, 1, True), (1, 2, True), (2, 4, True), (4, 2, True), (2, 2, False)]
)
def test_replicated_needs_the_same_tokens(tp_size: int, ep_size: int, enabled: bool) -> None:
    document = plan(tp_size, ep_size)
    document["expert_parallel"]["enabled"] = enabled
    document["ds_hybrid"] = {"dispatch": {"mode": "replicated"}}
    assert find_problems(document, name="x.json") == [
        'ds_hybrid.dispatch.mode = "replicated" (x.json): needs the same tokens on all ranks of an expert-parallel '
        "group: tensor_parallel.autotp_size and expert_parallel.autoep_size must be one size of at least 2, not "
        f'{tp_size} and {ep_size}, and expert_parallel.enabled true. Set them so, or the mode to "two_stage".'
    ]


def test_replicated_with_the_same_tokens() -> None:
    assert find_problems({**plan(4, 4), "ds_hybrid": {"dispatch": {"mode": "replicated"}}}, name="x.json") == []


BESIDE = "with expert_parallel and tensor_parallel.autotp_size 2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 1}},
            f"expert_parallel.autoep_size = 1 (x.json): must be at least 2 {BESIDE}. Set it to 2.",
        ),
        (
            {"expert_parallel": {"enabled": True}},
            f"expert_parallel.autoep_size (x.json): must be at least 2 {BESIDE}. Set it to 2.",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}},
            f"tensor_parallel.partition_config (x.json): missing {BESIDE}: DeepSpeed refuses the plans that come with "
            "MoE models. Copy the one of ds_configs/plan_a_zero1_bf16.json.",
        ),
        (
            {"bf16": {"enabled": True}},
            f"zero_optimization.stage (x.json): DeepSpeed clips by a wrong norm in half precision {BESIDE}. "
            "Set it to 1, 2 or 3.",
        ),
        (
            {"fp16": {"enabled": True}, "zero_optimization": {"stage": 0}},
            f"zero_optimization.stage = 0 (x.json): DeepSpeed clips by a wrong norm in half precision {BESIDE}. "
            "Set it to 1, 2 or 3.",
        ),
    ],
)
def test_tensor_parallelism_with_expert_parallelism(change: dict[str, Any], message: str) -> None:
    assert find_problems({**plan(2, 2), **change}, name="x.json") == [message]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tensor_parallel": {"autotp_size": 2, "preset_model": "mixtral"}},
        {"bf16": {"enabled": True}, "gradient_clipping": 0.0},
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
        {"tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": False}},
    ],
)
def test_tensor_parallelism_that_trains(change: dict[str, Any]) -> None:
    assert find_problems({**plan(2, 2), **change}, name="x.json") == []


def plan(tp_size: int, ep_size: int) -> dict[str, Any]:
    return {
        **GOOD,
        "tensor_parallel": {"autotp_size": tp_size, "partition_config": {"layer_specs": []}},
        "expert_parallel": {"enabled": True, "autoep_size": ep_size},
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"expert_parallel": {"combine_impl": "legacy_bmm"}},
            'expert_parallel.combine_impl = "legacy_bmm" (x.json): has no effect with ds_hybrid\'s dispatchers. '
            "Remove it.",
        ),
        (
            {"expert_parallel": {"row_weighting_impl": "fused"}},
            'expert_parallel.row_weighting_impl = "fused" (x.json): has no effect with ds_hybrid\'s dispatchers. '
            "Remove it.",
        ),
        (
            {"expert_parallel": {"comm_backend": "deepep"}},
            'expert_parallel.comm_backend = "deepep" (x.json): has no effect with ds_hybrid\'s dispatchers. Remove it.',
        ),
        (
            {"expert_parallel": {"async_split_plan": True}},
            "expert_parallel.async_split_plan = true (x.json): has no effect with ds_hybrid's dispatchers. Remove it.",
        ),
        (
            {"expert_parallel": {"validate_folding_routing": True}},
            "expert_parallel.validate_folding_routing = true (x.json): has no effect with ds_hybrid's dispatchers. "
            "Remove it.",
        ),
    ],
)
def test_autoep_options_without_effect_are_warned_of(change: dict[str, Any], message: str) -> None:
    document = {**GOOD, **change}
    assert find_warnings(document, name="x.json") == []
    document["expert_parallel"] = {"enabled": True, **change["expert_parallel"]}
    assert find_problems(document, name="x.json") == []
    assert find_warnings(document, name="x.json") == [message]


def test_missing_clipping_is_warned_of() -> None:
    document = {"train_micro_batch_size_per_gpu": 4}
    assert find_problems(document, name="x.json") == []
    assert find_warnings(document, name="x.json") == [
        "gradient_clipping (x.json): missing, and DeepSpeed 0.19.8 then clips at 1.0. Set it (0.0 turns clipping off).",
    ]


def test_auto_is_refused_where_nobody_fills_it_in() -> None:
    document = {**GOOD, "train_batch_size": "auto", "bf16": {"enabled": "auto"}, "ds_hybrid": {"dispatch": {}}}
    assert load(document) == HybridConfig()
    with pytest.raises(ConfigError) as caught:
        load(document, allow_auto=False)
    assert caught.value.problems == (
        'train_batch_size = "auto" (ds_config): only Hugging Face\'s Trainer fills this in. Set a value.',
        'bf16.enabled = "auto" (ds_config): only Hugging Face\'s Trainer fills this in. Set a value.',
    )


def test_what_is_refused_differs_from_the_default() -> None:
    defaults = {"ds_hybrid": HybridConfig().model_dump()}
    ours = {path: works for path, works in NOT_YET.items() if path.startswith("ds_hybrid.")}
    assert [path for path, works in ours.items() if value_at(defaults, path) not in works] == []


@pytest.mark.parametrize(
    ("groups", "world_size", "group_size", "broken"),
    [
        ([[0, 1, 4, 5], [2, 3, 6, 7]], 8, 4, []),
        ([[1, 0], [3, 2]], None, None, []),
        ([], 8, 2, ["must hold at least one group, and no empty one."]),
        ([[0], []], 8, 2, ["must hold at least one group, and no empty one."]),
        ([[0, 1, 2], [3]], 4, 2, ["groups must have one size, not 1, 3."]),
        ([[0, 1], [2, 3]], 4, 4, ["groups must hold expert_parallel.autoep_size 4 ranks, not 2."]),
        ([[0, 1], [2, 3]], 8, 2, ["must hold each rank from 0 to 7 once: missing 4, 5, 6, 7."]),
        (
            [[0, 1], [1, 9]],
            None,
            None,
            ["must hold each rank from 0 to 3 once: missing 2, 3; given twice 1; outside 9."],
        ),
        (
            [[0, 1], [2]],
            4,
            2,
            ["groups must have one size, not 1, 2.", "must hold each rank from 0 to 3 once: missing 3."],
        ),
    ],
)
def test_broken_partition(
    groups: list[list[int]], world_size: int | None, group_size: int | None, broken: list[str]
) -> None:
    assert broken_partition(groups, world_size=world_size, group_size=group_size) == broken


def test_expert_groups_are_checked_against_the_sizes_of_the_file() -> None:
    document = {
        **GOOD,
        "expert_parallel": {"enabled": True, "autoep_size": 4},
        "ds_hybrid": {"topology": {"expert_groups": [[0, 1], [2, 3]]}},
    }
    assert find_problems(document, name="x.json", world_size=8) == [
        "ds_hybrid.topology.expert_groups = [[0, 1], [2, 3]] (x.json): groups must hold expert_parallel.autoep_size 4 "
        "ranks, not 2.",
        "ds_hybrid.topology.expert_groups = [[0, 1], [2, 3]] (x.json): must hold each rank from 0 to 7 once: "
        "missing 4, 5, 6, 7.",
    ]


@pytest.mark.parametrize(
    ("zero_optimization", "problem"),
    [
        (
            {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}},
            'zero_optimization.offload_optimizer.device = "nvme" (x.json): experts cannot move with it. Set it to '
            '"cpu", "none" or null, or ds_hybrid.rebalance.enabled to false.',
        ),
        (
            {"stage": 3, "zero_hpz_partition_size": 2},
            "zero_optimization.zero_hpz_partition_size = 2 (x.json): experts cannot move with it. Set it to 1, or "
            "ds_hybrid.rebalance.enabled to false.",
        ),
    ],
)
def test_rebalancing_refuses_what_experts_cannot_take_along(zero_optimization: dict[str, Any], problem: str) -> None:
    for enabled, expected in ((True, [problem]), (False, [])):
        document = {**GOOD, "zero_optimization": zero_optimization, "ds_hybrid": {"rebalance": {"enabled": enabled}}}
        assert find_problems(document, name="x.json") == expected


def test_universal_checkpoints_are_not_loaded_in_turns() -> None:
    document = {**GOOD, "checkpoint": {"load_universal": True}, "zero_optimization": {"round_robin_gradients": True}}
    assert find_problems(document, name="x.json") == [
        "zero_optimization.round_robin_gradients = true (x.json): DeepSpeed 0.19.8 loads universal checkpoints to "
        "wrong places with it. Set it to false for this run."
    ]


def test_all_problems_of_a_file_come_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = {
        "train_batch_size": 30,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_optimisation": {"stage": 1},
        "zero_optimization": {"stage": "1"},
        "expert_parallel": {"enabled": True, "autoep_size": 3, "score_apply": "pre"},
        "ds_hybrid": {
            "dispatch": {"mode": "allgatther", "guard": 1},
            "attention": {"kv_gather": "ring"},
            "observe": {"routing_trace": True},
        },
    }
    Path("x.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError) as caught:
        load("x.json", world_size=8)
    assert caught.value.problems == (
        'zero_optimisation (x.json): unknown key. Did you mean "zero_optimization"?',
        'zero_optimization.stage = "1" (x.json): must be an integer from 0 to 3.',
        "train_batch_size = 30 (x.json): must equal train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 1 "
        "x data-parallel size 8 = 32. Set it to 32.",
        "expert_parallel.autoep_size = 3 (x.json): must divide world_size 8. Values that work: 1, 2, 4, 8.",
        'ds_hybrid.dispatch.mode = "allgatther" (x.json): must be one of auto, alltoall, allgather, two_stage, '
        'hierarchical, replicated. Did you mean "allgather"?',
        "ds_hybrid.dispatch.guard = 1 (x.json): must be true or false.",
        f'expert_parallel.score_apply = "pre" (x.json): not available in {RELEASE} with expert_parallel. '
        'Set it to "auto" or "post".',
        NOTHING_TO_GATHER.format("ring"),
        "ds_hybrid.observe.routing_trace = true (x.json): needs ds_hybrid.observe.directory. Set that to a directory "
        'such as "runs/1", or this to false.',
    )


SHARED: dict[str, Any] = {
    **GOOD,
    "sequence_parallel_size": 2,
    "ds_hybrid": {"attention": {"kv_gather": "auto"}},
}


@pytest.mark.parametrize("kv_gather", ["whole", "blocks", "ring", "auto"])
def test_sequences_over_ranks(kv_gather: str) -> None:
    document = {**SHARED, "data_parallel_size": 2, "ds_hybrid": {"attention": {"kv_gather": kv_gather}}}
    assert load(document, world_size=4).attention.kv_gather == kv_gather
    assert gathers_kv(document)


def test_ulysses_is_left_to_deepspeed() -> None:
    document = {**SHARED, "data_parallel_size": 3, "tensor_parallel": {"autotp_size": 2}, "ds_hybrid": {}}
    assert find_problems(document, name="x.json", world_size=8) == []
    assert not gathers_kv(document)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_parallel_size": 1}, NOTHING_TO_GATHER.format("auto")),
        (
            {"tensor_parallel": {"autotp_size": 2}},
            'tensor_parallel.autotp_size = 2 (x.json): not available with ds_hybrid.attention.kv_gather "auto". Set it '
            'to 0 or 1, or ds_hybrid.attention.kv_gather to "off".',
        ),
        (
            {"compile": {"deepcompile": True}},
            'compile.deepcompile = true (x.json): not available with ds_hybrid.attention.kv_gather "auto". Set it '
            'to false, or ds_hybrid.attention.kv_gather to "off".',
        ),
        (
            {"data_parallel_size": 8},
            "data_parallel_size = 8 (x.json): must be world_size 8 / sequence_parallel_size 2. Remove it, "
            "or set it to 4.",
        ),
        (
            {"sequence_parallel_size": 3},
            "world_size = 8 (x.json): must be a multiple of tensor_parallel.autotp_size 1 x "
            "sequence_parallel_size 3 = 3. Set it to 6 or 9.",
        ),
    ],
)
def test_wrong_sequences(changes: dict[str, Any], message: str) -> None:
    assert find_problems({**SHARED, **changes}, name="x.json", world_size=8) == [message]


@pytest.mark.parametrize("argument", ["world_size", "num_experts"])
def test_sizes_of_the_run_must_be_positive(argument: str) -> None:
    sizes: dict[str, Any] = {argument: 0}
    with pytest.raises(ConfigError) as caught:
        load(GOOD, **sizes)
    assert caught.value.problems == (f"{argument} = 0 (ds_config): must be an integer >= 1.",)
