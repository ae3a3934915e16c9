"""The tables of keys against the installed DeepSpeed. A failure here means that DeepSpeed added or removed a key."""

from __future__ import annotations

import ast
import inspect
import textwrap
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from deepspeed.module_inject.auto_ep_config import parse_autoep_config
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from ds_hybrid.deepspeed_keys import REMOVED, SECTIONS, TOP_LEVEL, VERSION


class Asked(dict[str, Any]):
    """A dict that remembers each key it was asked for, also after ``copy.copy``."""

    def __init__(self, items: Iterable[tuple[str, Any]] = (), keys: set[str] | None = None) -> None:
        super().__init__(items)
        self.asked = set() if keys is None else keys

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Asked:
        return Asked(self.items(), self.asked)


def read_by_initialize() -> set[str]:
    """The keys that ``deepspeed.initialize`` itself looks up in ``config``, before and beside DeepSpeedConfig."""
    keys = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(deepspeed.initialize)))):
        match node:
            case ast.Subscript(value=ast.Name(id="config"), slice=ast.Constant(value=str(key))):
                keys.add(key)
            case ast.Compare(left=ast.Constant(value=str(key)), comparators=[ast.Name(id="config")]):
                keys.add(key)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="config"), attr="get"), args=[ast.Constant(value=str(key)), *_]
            ):
                keys.add(key)
    return keys


def names_of(model: Any) -> set[str]:
    """Every name by which a file may set a field of a DeepSpeed model."""
    return set(model.model_fields) | {field.alias for field in model.model_fields.values() if field.alias}


def test_version() -> None:
    pins = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
    assert f"deepspeed=={VERSION}" in pins
    assert deepspeed.__version__.split("+")[0] == VERSION


def test_top_level() -> None:
    # zero_optimization as a boolean is the old form, and makes DeepSpeed look for the keys that went with it.
    document = Asked({"train_batch_size": 1, "zero_optimization": True}.items())
    deepspeed_config.DeepSpeedConfig(document)
    asked = document.asked | read_by_initialize()
    assert asked - REMOVED == TOP_LEVEL
    assert asked >= REMOVED


def test_removed() -> None:
    assert set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS) == REMOVED
    removed_from_zero = set(deepspeed_config._REMOVED_ZERO_CONFIG_KEYS)
    assert removed_from_zero & SECTIONS["zero_optimization"] == set()


@pytest.mark.parametrize(
    ("section", "model"),
    [
        ("zero_optimization", DeepSpeedZeroConfig),
        ("bf16", DeepSpeedBF16Config),
        ("bfloat16", DeepSpeedBF16Config),
        ("fp16", DeepSpeedFP16Config),
        ("tensor_parallel", TPTrainingConfig),
    ],
)
def test_section_with_a_model(section: str, model: Any) -> None:
    assert names_of(model) == SECTIONS[section]


def test_expert_parallel() -> None:
    section = Asked({"enabled": True}.items())
    parse_autoep_config(section)
    assert section.asked == SECTIONS["expert_parallel"]


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_section_that_names_a_class(section: str) -> None:
    body = Asked({"type": "Any", "params": {}}.items())
    deepspeed_config.DeepSpeedConfig({"train_batch_size": 1, section: body})
    assert body.asked == SECTIONS[section]


def test_every_section_is_compared() -> None:
    compared = {"zero_optimization", "bf16", "bfloat16", "fp16", "tensor_parallel", "expert_parallel", "optimizer"}
    assert set(SECTIONS) == compared | {"scheduler"}
    assert set(SECTIONS) <= TOP_LEVEL


@pytest.mark.parametrize("file", sorted(Path("ds_configs").glob("*zero*.json")), ids=lambda file: file.stem)
def test_deepspeed_accepts_the_shipped_file(file: Path) -> None:
    parsed = deepspeed_config.DeepSpeedConfig(str(file))
    sizes = {"plan_a": (4, 4), "plan_b": (2, 8)}.get(file.stem[:6], (0, 2))
    assert (parsed.tensor_parallel_config.autotp_size, parsed.expert_parallel_config.autoep_size) == sizes
    assert f"zero{parsed.zero_optimization_stage}" in file.stem
    assert parsed.bfloat16_config.enabled == file.stem.endswith("bf16")
