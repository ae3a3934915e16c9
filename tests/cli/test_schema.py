"""``ds_hybrid schema``, and that schema and checks agree about the shipped files and about wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ds_hybrid.cli.main import main
from ds_hybrid.cli.schema import SCHEMA_PATH, build_schema
from ds_hybrid.config import HybridConfig
from ds_hybrid.deepspeed_keys import SECTIONS, TOP_LEVEL

SHIPPED = [
    "alltoall_zero2_bf16",
    "plan_a_zero1_bf16",
    "plan_b_zero1_bf16",
    "rebalance_zero1_bf16",
    "sequence_parallel_zero1_bf16",
    "trainer_auto",
    "two_stage_zero1",
    "two_stage_zero1_bf16",
    "two_stage_zero3_bf16",
]
GOOD: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}


def test_the_committed_schema_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--check"]) == 0
    assert capsys.readouterr().out == "ds_configs/ds_hybrid.schema.json: current\n"
    assert json.loads(SCHEMA_PATH.read_text()) == build_schema()


def test_write_then_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["schema", "--check"]) == 2
    assert main(["schema"]) == 2
    SCHEMA_PATH.parent.mkdir()
    SCHEMA_PATH.write_text("{}")
    assert main(["schema", "--check"]) == 2
    assert main(["schema"]) == 0
    assert main(["schema", "--check"]) == 0
    assert main(["schema", "--out", "other.json"]) == 0
    assert Path("other.json").read_text() == SCHEMA_PATH.read_text()
    assert capsys.readouterr().err.splitlines() == [
        "ds_configs/ds_hybrid.schema.json: No such file or directory",
        "ds_configs/ds_hybrid.schema.json: No such file or directory",
        "ds_configs/ds_hybrid.schema.json: not current. Run `ds_hybrid schema`.",
    ]


def test_the_shipped_files_are_these() -> None:
    assert sorted(path.stem for path in Path("ds_configs").glob("*.json")) == sorted([*SHIPPED, "ds_hybrid.schema"])


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_file_matches_and_writes_out_the_whole_section(name: str) -> None:
    document = json.loads(Path(f"ds_configs/{name}.json").read_text())
    assert list(Draft202012Validator(build_schema()).iter_errors(document)) == []
    assert document["$schema"] == "./ds_hybrid.schema.json"
    defaults = HybridConfig().model_dump(exclude={"plan"})
    defaults["dispatch"]["mode"] = document["ds_hybrid"]["dispatch"]["mode"]
    defaults["rebalance"]["enabled"] = name.startswith("rebalance")
    defaults["attention"]["kv_gather"] = "auto" if name.startswith("sequence") else "off"
    assert document["ds_hybrid"] == defaults


@pytest.mark.parametrize(
    "change",
    [
        {"zero_optimisation": {}},
        {"zero_optimization": {"stag": 1}},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": True},
        {"train_batch_size": 2.5},
        {"gradient_clipping": -1},
        {"amp": {}},
        {"ds_hybrid": {"dispatch": {"mode": "allgatther"}}},
        {"ds_hybrid": {"dispatch": {"guard": 1}}},
        {"ds_hybrid": {"topology": {"expert_groups": [["0"]]}}},
        {"ds_hybrid": {"dispach": {}}},
    ],
)
def test_wrong_document_does_not_match(change: dict[str, Any]) -> None:
    assert not Draft202012Validator(build_schema()).is_valid({**GOOD, **change})


def test_a_batch_size_is_required() -> None:
    assert not Draft202012Validator(build_schema()).is_valid({"gradient_clipping": 1.0})
    assert Draft202012Validator(build_schema()).is_valid({"train_batch_size": 8})


def test_schema_is_valid_and_names_every_key() -> None:
    schema = build_schema()
    Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) == TOP_LEVEL | {"$schema", "ds_hybrid"}
    for section, keys in SECTIONS.items():
        definition = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]]
        assert set(definition["properties"]) == keys


def test_every_key_of_ours_has_a_description() -> None:
    definitions = [node for name, node in build_schema()["$defs"].items() if name.endswith("Config")]
    keys = [(key, field) for node in definitions for key, field in node["properties"].items() if "$ref" not in field]
    assert len(keys) == 23
    assert [key for key, field in keys if not field.get("description")] == []
