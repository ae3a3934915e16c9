"""The reference of a ds_config's "ds_hybrid" section as Markdown, from the models and tables that check it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_hybrid import config
from ds_hybrid.config import HybridConfig
from ds_hybrid.document import DeepSpeedKeys
from ds_hybrid.problems import listed, show, values_of

REFERENCE_PATH: Final = Path("docs/configuration.md")

_GUIDES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "dispatch": "dispatchers.md",
        "topology": "launching.md",
        "rebalance": "rebalance.md",
        "attention": "attention.md",
        "observe": "observe.md",
        "plan": "planner.md",
    }
)
"""The page that says more of a section."""

_EXAMPLES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "dispatch.mode": "two_stage",
        "dispatch.wire_dtype": "fp8_e4m3",
        "dispatch.overlap_chunks": 4,
        "topology.source": "machines/rack.yaml",
        "topology.expert_groups": [[0, 1, 4, 5], [2, 3, 6, 7]],
        "topology.timeout_seconds": 600,
        "rebalance.algorithm": "lpt_swap",
        "rebalance.threshold": 1.5,
        "attention.kv_gather": "auto",
        "observe.directory": "runs/first",
        "plan": {"needs": {"checkpoints": True, "loss_chunk": 1024}},
    }
)
"""Values to show. A key that is not here shows another value than its default, or its default."""

_BESIDE: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "attention.kv_gather": MappingProxyType({"sequence_parallel_size": 2}),
        "observe.routing_trace": MappingProxyType({"ds_hybrid.observe.directory": "runs/1"}),
    }
)
"""Other keys that an example needs, by their path in the file."""

_INTRODUCTION = """\
# Every key of the "ds_hybrid" section

Written by `ds_hybrid schema --markdown` from the models that check a ds_config. Do not edit it.

The section stands in a ds_config beside DeepSpeed's own keys. Every key has a default, so `"ds_hybrid": {}` is whole.
An unknown key, ours or DeepSpeed's, is an error with the nearest right name. `ds_hybrid validate FILE` tells every
problem of a file at once; `ds_configs/ds_hybrid.schema.json` lets an editor complete and check keys.
"""


def reference() -> str:
    """The whole page."""
    return "\n".join([_INTRODUCTION, *_sections(), *_deepspeed_keys(), *_refusals()])


def examples() -> dict[str, dict[str, Any]]:
    """For each key of the section, by its path in it: what to write in a ds_config to set it."""
    return {path: _example(path, field) for path, field in _fields()}


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    for name, field in HybridConfig.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from ((f"{name}.{key}", inner) for key, inner in section.model_fields.items())
        else:
            yield name, field


def _sections() -> Iterator[str]:
    schema = HybridConfig.model_json_schema()
    for name, field in HybridConfig.model_fields.items():
        guide = f"More: [{_GUIDES[name]}]({_GUIDES[name]}).\n" if name in _GUIDES else ""
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield f"## {name}\n\n{section.__doc__}\n{guide}"
            properties = schema["$defs"][section.__name__]["properties"]
            for key, inner in section.model_fields.items():
                yield _key(f"{name}.{key}", inner, properties[key])
        else:
            yield _key(name, field, schema["properties"][name], level=2) + f"\n{guide}"


def _key(path: str, field: FieldInfo, schema: Mapping[str, Any], *, level: int = 3) -> str:
    return (
        f"{'#' * level} {path}\n\n{field.description}\n\n"
        f"- Value: {values_of(schema)}.\n- Default: `{show(field.default)}`\n\n"
        f"```json\n{json.dumps(_example(path, field))}\n```\n"
    )


def _example(path: str, field: FieldInfo) -> dict[str, Any]:
    value = _EXAMPLES.get(path, not field.default if isinstance(field.default, bool) else field.default)
    document: dict[str, Any] = {}
    for place, setting in {**_BESIDE.get(path, {}), f"ds_hybrid.{path}": value}.items():
        *sections, key = place.split(".")
        inner = document
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = setting
    return document


def _deepspeed_keys() -> Iterator[str]:
    yield "## DeepSpeed's keys whose values are checked\n"
    yield "Sizes stay where DeepSpeed has them. The other keys of DeepSpeed 0.19.8 are checked for their names alone.\n"
    yield "| key | value | meaning |\n|---|---|---|"
    schema = DeepSpeedKeys.model_json_schema()
    for path, inner in _leaves(schema, schema["properties"]):
        yield f"| `{path}` | {values_of(inner)} | {inner['description']} |"
    yield ""


def _leaves(schema: Mapping[str, Any], properties: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in properties.items():
        definition = schema["$defs"][inner["$ref"].rpartition("/")[2]] if "$ref" in inner else inner
        if "properties" in definition and "description" not in inner:
            yield from _leaves(schema, definition["properties"], f"{at}{key}.")
        elif "properties" in definition:
            yield f"{at}{key}", {"type": "object", "description": inner["description"]}
        else:
            yield f"{at}{key}", inner


def _refusals() -> Iterator[str]:
    yield "## Values that are refused\n"
    yield from _table("In this version", config.NOT_YET)
    yield from _table("With `expert_parallel.enabled`", config.NOT_YET_WITH_EXPERT_PARALLEL)
    yield from _table("With `ds_hybrid.rebalance.enabled`", config.NOT_WITH_REBALANCE)
    yield from _table('With `ds_hybrid.attention.kv_gather` other than "off"', config.NOT_WITH_KV_GATHER)
    yield from _table("Not refused, but in vain: AutoEP's options that our dispatchers replace", config.REPLACED)


def _table(title: str, rows: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    yield f"{title}:\n\n| key | values that work |\n|---|---|"
    yield from (f"| `{path}` | `{listed(works)}` |" for path, works in rows.items())
    yield ""
