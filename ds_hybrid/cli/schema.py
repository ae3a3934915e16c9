"""``ds_hybrid schema``: the JSON schema of a ds_config, for editors to complete and check keys while one types.

``--markdown`` writes the page about its keys in its place.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic.json_schema import GenerateJsonSchema

from ds_hybrid import deepspeed_keys
from ds_hybrid.cli.reference import REFERENCE_PATH, reference
from ds_hybrid.config import HybridConfig
from ds_hybrid.document import OUR_KEYS, DeepSpeedKeys
from ds_hybrid.errors import ConfigError

SCHEMA_PATH = Path("ds_configs/ds_hybrid.schema.json")

_EXAMPLES = """examples:
  ds_hybrid schema
  ds_hybrid schema --check
  ds_hybrid schema --out /tmp/ds_hybrid.schema.json
  ds_hybrid schema --markdown
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the sub-command."""
    parser = commands.add_parser(
        "schema",
        help="write the JSON schema of a ds_config",
        description="Write the JSON schema of a ds_config, DeepSpeed's keys and ours.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--markdown", action="store_true", help=f"the page of our keys instead: {REFERENCE_PATH}")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--out", type=Path, metavar="PATH", help=f"default: {SCHEMA_PATH}")
    action.add_argument("--check", action="store_true", help=f"fail unless {SCHEMA_PATH} is current")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the schema or the page, or compare it with the one in the working directory."""
    own, text = (REFERENCE_PATH, reference()) if arguments.markdown else (SCHEMA_PATH, _schema_text())
    path = arguments.out or own
    if not arguments.check:
        path.write_text(text, encoding="utf-8")
        print(f"{path}: written")
    elif path.read_text(encoding="utf-8") != text:
        raise ConfigError(f"{path}: not current. Run `ds_hybrid schema{' --markdown' if arguments.markdown else ''}`.")
    else:
        print(f"{path}: current")
    return 0


def _schema_text() -> str:
    return json.dumps(build_schema(), indent=2) + "\n"


def build_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, of a whole ds_config. Sections of DeepSpeed that are not checked take any value."""
    schema = _Document.model_json_schema(schema_generator=_Untitled)
    _close(schema, deepspeed_keys.TOP_LEVEL | OUR_KEYS)
    for section, keys in deepspeed_keys.SECTIONS.items():
        definition = schema["properties"][section]["$ref"].rpartition("/")[2]
        _close(schema["$defs"][definition], keys)
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        **schema,
        "title": "ds_config",
        "description": f"A configuration of DeepSpeed {deepspeed_keys.VERSION} with ds_hybrid.",
        "anyOf": [{"required": ["train_batch_size"]}, {"required": ["train_micro_batch_size_per_gpu"]}],
    }


class _Document(DeepSpeedKeys):
    ds_hybrid: HybridConfig = Field(description="How ds_hybrid trains the MoE layers.")


class _Untitled(GenerateJsonSchema):
    """Without the titles that only repeat the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _close(schema: dict[str, Any], keys: frozenset[str]) -> None:
    """Name all ``keys`` in ``schema``, allow no other and require none."""
    for key in sorted(keys):
        schema["properties"].setdefault(key, {})
    schema["additionalProperties"] = False
    schema.pop("required", None)
