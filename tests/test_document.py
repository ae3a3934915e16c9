"""Reading a ds_config, and DeepSpeed's part of it: a table of wrong files with the message of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_hybrid.document import deepspeed_problems, read_document
from ds_hybrid.errors import ConfigError

GOOD: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_optimisation": {}}, 'zero_optimisation (x.json): unknown key. Did you mean "zero_optimization"?'),
        ({"ds_hybird": {}}, 'ds_hybird (x.json): unknown key. Did you mean "ds_hybrid"?'),
        ({"colour": 1}, "colour (x.json): unknown key. Remove it."),
        (
            {"zero_optimization": {"stage": 1, "overlap_com": True}},
            'zero_optimization.overlap_com (x.json): unknown key. Did you mean "overlap_comm"?',
        ),
        (
            {"expert_parallel": {"enabled": True, "auto_ep_size": 2}},
            'expert_parallel.auto_ep_size (x.json): unknown key. Did you mean "autoep_size"?',
        ),
        ({"bf16": {"enable": True}}, 'bf16.enable (x.json): unknown key. Did you mean "enabled"?'),
        (
            {"fp16": {"enabled": True, "los_scale": 0}},
            'fp16.los_scale (x.json): unknown key. Did you mean "loss_scale"?',
        ),
        ({"optimizer": {"type": "AdamW", "lr": 0.1}}, "optimizer.lr (x.json): unknown key. Remove it."),
        ({"scheduler": {"typ": "WarmupLR"}}, 'scheduler.typ (x.json): unknown key. Did you mean "type"?'),
        (
            {"tensor_parallel": {"autotp_sise": 2}},
            'tensor_parallel.autotp_sise (x.json): unknown key. Did you mean "autotp_size"?',
        ),
        ({"amp": {}}, "amp (x.json): DeepSpeed 0.19.8 has removed it and refuses the file. Remove it."),
        (
            {"zero_optimization": {"stage": "1"}},
            'zero_optimization.stage = "1" (x.json): must be an integer from 0 to 3.',
        ),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4 (x.json): must be an integer from 0 to 3."),
        (
            {"zero_optimization": {"stage": True}},
            "zero_optimization.stage = true (x.json): must be an integer from 0 to 3.",
        ),
        ({"zero_optimization": True}, "zero_optimization = true (x.json): must be an object."),
        ({"train_batch_size": 2.5}, 'train_batch_size = 2.5 (x.json): must be an integer >= 1 or "auto".'),
        ({"train_batch_size": None}, 'train_batch_size = null (x.json): must be an integer >= 1 or "auto".'),
        (
            {"gradient_accumulation_steps": "1"},
            'gradient_accumulation_steps = "1" (x.json): must be an integer >= 1 or "auto".',
        ),
        (
            {"gradient_accumulation_steps": True},
            'gradient_accumulation_steps = true (x.json): must be an integer >= 1 or "auto".',
        ),
        ({"gradient_clipping": -1}, 'gradient_clipping = -1 (x.json): must be a number >= 0 or "auto".'),
        ({"steps_per_print": 0}, "steps_per_print = 0 (x.json): must be a number > 0 or null."),
        ({"wall_clock_breakdown": "no"}, 'wall_clock_breakdown = "no" (x.json): must be true or false.'),
        (
            {"zero_optimization": {"reduce_bucket_size": "big"}},
            'zero_optimization.reduce_bucket_size = "big" (x.json): must be a number >= 0 or "auto".',
        ),
        ({"bf16": {"enabled": 1}}, 'bf16.enabled = 1 (x.json): must be true, false or "auto".'),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale = -1 (x.json): must be a number >= 0."),
        ({"optimizer": {"type": 3}}, "optimizer.type = 3 (x.json): must be a string."),
        ({"scheduler": []}, "scheduler = [] (x.json): must be an object."),
        ({"expert_parallel": {"autoep_size": 0}}, "expert_parallel.autoep_size = 0 (x.json): must be an integer >= 1."),
        (
            {"tensor_parallel": {"autotp_size": -1}},
            "tensor_parallel.autotp_size = -1 (x.json): must be an integer >= 0.",
        ),
        (
            {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
            "fp16.enabled = true (x.json): bf16.enabled is true too. Set one of them to false.",
        ),
        (
            {"bfloat16": {"enabled": True}, "fp16": {"enabled": True}},
            "fp16.enabled = true (x.json): bfloat16.enabled is true too. Set one of them to false.",
        ),
        (
            {"train_batch_size": 30},
            "train_batch_size = 30 (x.json): must be a multiple of train_micro_batch_size_per_gpu 4. "
            "Set it to 28 or 32.",
        ),
    ],
)
def test_wrong_document(change: dict[str, Any], message: str) -> None:
    assert [problem.line("x.json") for problem in deepspeed_problems({**GOOD, **change})] == [message]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train_batch_size": 30, "gradient_accumulation_steps": 1},
            "train_batch_size = 30 (x.json): must equal train_micro_batch_size_per_gpu 4 "
            "x gradient_accumulation_steps 1 x data-parallel size 8 = 32. Set it to 32.",
        ),
        (
            {"train_batch_size": 72},
            "train_batch_size = 72 (x.json): must be a multiple of train_micro_batch_size_per_gpu 4 "
            "x data-parallel size 8 = 32. Set it to 64 or 96.",
        ),
        (
            {"train_batch_size": 30, "train_micro_batch_size_per_gpu": "auto"},
            "train_batch_size = 30 (x.json): must be a multiple of data-parallel size 8. Set it to 24 or 32.",
        ),
        (
            {"train_batch_size": 4, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2},
            "train_batch_size = 4 (x.json): must be a multiple of gradient_accumulation_steps 2 "
            "x data-parallel size 8 = 16. Set it to 16.",
        ),
        (
            {"train_batch_size": 32, "gradient_accumulation_steps": 1, "sequence_parallel_size": 2},
            "train_batch_size = 32 (x.json): must equal train_micro_batch_size_per_gpu 4 "
            "x gradient_accumulation_steps 1 x data-parallel size 4 = 16. Set it to 16.",
        ),
        (
            {"sequence_parallel_size": 3, "tensor_parallel": {"autotp_size": 2}},
            "world_size = 8 (x.json): must be a multiple of tensor_parallel.autotp_size 2 x "
            "sequence_parallel_size 3 = 6. Set it to 6 or 12.",
        ),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 3}},
            "expert_parallel.autoep_size = 3 (x.json): must divide world_size 8 and num_experts 12. "
            "Values that work: 1, 2, 4.",
        ),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 8}},
            "expert_parallel.autoep_size = 8 (x.json): must divide world_size 8 and num_experts 12. "
            "Values that work: 1, 2, 4.",
        ),
    ],
)
def test_wrong_sizes(change: dict[str, Any], message: str) -> None:
    problems = deepspeed_problems({**GOOD, **change}, world_size=8, num_experts=12)
    assert [problem.line("x.json") for problem in problems] == [message]


def test_missing_keys() -> None:
    assert [problem.line("x.json") for problem in deepspeed_problems({})] == [
        "train_micro_batch_size_per_gpu (x.json): missing. Set it, or set train_batch_size.",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"train_batch_size": 32, "gradient_accumulation_steps": 1},
        {"train_batch_size": 64},
        {"train_batch_size": 32, "gradient_accumulation_steps": 1, "tensor_parallel": {"autotp_size": 2}},
        {"train_batch_size": 16, "gradient_accumulation_steps": 1, "sequence_parallel_size": 2},
        {"steps_per_print": None},
        {"expert_parallel": {"enabled": True}},
        {"expert_parallel": {"enabled": False, "autoep_size": 3}},
        {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000}},
        {"steps_per_print": float("inf"), "$schema": "./ds_hybrid.schema.json", "ds_hybrid": {}},
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"}}},
    ],
)
def test_right_document(change: dict[str, Any]) -> None:
    assert deepspeed_problems({**GOOD, **change}, world_size=8, num_experts=12) == []


def test_values_that_trainer_fills_in_are_tolerated() -> None:
    document = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
    }
    assert deepspeed_problems(document, world_size=8) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{\n  "a": 1,\n  "b": }\n}',
            "x.json: line 3, column 8: Found a punctuator character when expecting a quoteless string "
            "(check your syntax).",
        ),
        ('{"a": 1} x', "x.json: line 1, column 10: Extra data."),
        ("[1]", "x.json: must hold one object, not a list."),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "c (x.json): given twice in one object. Keep one."),
        ('{"a": 1, "a": {"c": 1, "c": 2}}', "c (x.json): given twice in one object. Keep one.\n"
         "a (x.json): given twice in one object. Keep one."),
    ],
)  # fmt: skip
def test_unreadable_text(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_document("x.json")
    assert str(caught.value) == message


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.json").write_bytes(b'{"a": "\xe9"}')
    messages = []
    for name in ("none.json", ".", "latin.json"):
        with pytest.raises(ConfigError) as caught:
            read_document(Path(name))
        messages.append(str(caught.value))
    assert messages == [
        "none.json: No such file or directory. Check the path.",
        ".: Is a directory. Check the path.",
        "latin.json: byte 7 is not UTF-8. Save the file as UTF-8.",
    ]


def test_comments_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x.hjson"
    file.write_text('{\n  # why\n  "a": 1, // here\n  /* there */ "b": {"c": [true, null, 1e-3, "d"]}\n}')
    assert read_document(file) == {"a": 1, "b": {"c": [True, None, 0.001, "d"]}}


def test_a_mapping_is_copied() -> None:
    document = {"a": 1}
    assert read_document(document) == document
    assert read_document(document) is not document
