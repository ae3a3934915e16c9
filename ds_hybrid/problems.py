"""A broken rule of a ds_config as one line: the place, the value that stands there, the rule and the fix.

The sentences ("must be an integer >= 1") come from the JSON schema of the pydantic models, so that a rule is written
down once, where its field is.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from ds_hybrid.errors import HybridError

ABSENT: Final = object()
"""Stands for a key that the file does not have; ``None`` is JSON's null."""

_LONGEST_VALUE = 80


@dataclass(frozen=True)
class Problem:
    """A rule that a document breaks. ``value`` stays ABSENT where there is nothing to show, such as an unknown key."""

    path: str
    rule: str
    value: Any = ABSENT

    def line(self, name: str) -> str:
        """The message for the file (or other origin) called ``name``."""
        shown = "" if self.value is ABSENT else f" = {show(self.value)}"
        return f"{self.path}{shown} ({name}): {self.rule}"


def show(value: Any) -> str:
    """``value`` as the file has it, cut when long. What JSON cannot say is shown as Python says it."""
    text = json.dumps(value, default=repr, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def listed(alternatives: Iterable[Any]) -> str:
    """``"a", "b" or 3``: the values to choose from, as the file would have them."""
    return _either([show(value) for value in alternatives])


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`` Did you mean "..."?`` with the candidate nearest to ``word``, or nothing when none is near."""
    nearest = get_close_matches(word, sorted(candidates), n=1)
    return f' Did you mean "{nearest[0]}"?' if nearest else ""


def unknown_key(path: str, candidates: Iterable[str]) -> Problem:
    """The key at ``path`` is none of ``candidates``, the keys that may stand there."""
    key = path.rpartition(".")[2]
    return Problem(path, "unknown key." + (did_you_mean(key, candidates) or " Remove it."))


def value_at(document: Mapping[str, Any], path: str) -> Any:
    """What stands at a dotted path, or ABSENT when some key on the way is missing or no object."""
    node: Any = document
    for key in path.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return ABSENT
        node = node[key]
    return node


def model_problems(model: type[BaseModel], data: Any, at: str = "") -> list[Problem]:
    """Every rule of ``model`` that the keys of ``data`` break, one for each key; an absent key breaks none.

    ``at`` is the path where ``data`` stands.
    """
    try:
        model.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
    else:
        return []
    details = [detail for detail in details if detail["type"] != "missing"]
    if not details:  # the schema takes longer than the check
        return []
    schema = model.model_json_schema()
    found: dict[str, Problem] = {}
    for detail in details:
        keys, node = _locate(schema, detail["loc"])
        unknown = [str(detail["loc"][-1])] if detail["type"] == "extra_forbidden" else []
        path = ".".join([*([at] if at else []), *keys, *unknown])
        if unknown:
            found[path] = unknown_key(path, node["properties"])
        else:
            value = value_at(data, ".".join(keys)) if keys else data
            found[path] = Problem(path, _rule(node, value), value)
    return list(found.values())


def _locate(schema: dict[str, Any], loc: Sequence[str | int]) -> tuple[list[str], dict[str, Any]]:
    """The keys of ``loc`` that name fields, and the last one's schema; pydantic adds union members and list indices."""
    keys: list[str] = []
    node = schema
    for key in loc:
        inner = node.get("properties", {}).get(key)
        if inner is None:
            break
        keys.append(str(key))
        node = schema["$defs"][inner["$ref"].rpartition("/")[2]] if "$ref" in inner else inner
    return keys, node


def _rule(schema: Mapping[str, Any], value: Any) -> str:
    hint = did_you_mean(value, _words(schema)) if isinstance(value, str) else ""
    return f"must be {values_of(schema)}." + hint


def values_of(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words: ``an integer >= 1 or null``."""
    return _either(_alternatives(schema))


def _alternatives(schema: Mapping[str, Any]) -> list[str]:
    match schema:
        case {"anyOf": members}:
            return [text for member in members for text in _alternatives(member)]
        case {"const": value}:
            return [show(value)]
        case {"enum": values}:
            return ["one of " + ", ".join(values)]
        case {"type": "boolean"}:
            return ["true", "false"]
        case {"type": "integer"}:
            return ["an integer" + _bounds(schema)]
        case {"type": "number"}:
            return ["a number" + _bounds(schema)]
        case {"type": "array", "items": items}:
            return ["a list of " + re.sub(r"\ban? (\w+)", r"\1s", _either(_alternatives(items)))]
        case {"type": "object"}:
            return ["an object"]
        case {"type": "string"}:
            return ["a string"]
    assert schema["type"] == "null", schema
    return ["null"]


def _bounds(schema: Mapping[str, Any]) -> str:
    match schema:
        case {"minimum": low, "maximum": high}:
            return f" from {low} to {high}"
        case {"minimum": low}:
            return f" >= {low}"
        case {"exclusiveMinimum": low}:
            return f" > {low}"
    return ""


def _words(schema: Mapping[str, Any]) -> list[str]:
    members = schema.get("anyOf", [schema])
    return [word for member in members for word in member.get("enum", [member.get("const")]) if isinstance(word, str)]


def _either(texts: Sequence[str]) -> str:
    *first, last = texts
    return f"{', '.join(first)} or {last}" if first else last


def read_text(path: str | Path, error: type[HybridError]) -> str:
    """The text of a file that a user names.

    Raises:
        error: the file is missing or unreadable, or not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{path}: byte {problem.start} is not UTF-8. Save the file as UTF-8.") from None
    except OSError as problem:
        raise error(f"{path}: {problem.strerror}. Check the path.") from None
