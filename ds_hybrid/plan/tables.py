"""Where the tables of models and machines lie, and reading one by its name or path. Pure."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any, Literal

import yaml

from ds_hybrid.errors import ConfigError
from ds_hybrid.problems import did_you_mean, read_text

Kind = Literal["models", "machines"]

_CHECKOUT = Path(__file__).parents[2] / "ds_configs"
_INSTALLED = Path(sysconfig.get_path("data")) / "share" / "ds_hybrid"


def table_names(kind: Kind) -> list[str]:
    """The names of the tables that come with ds_hybrid."""
    return sorted(path.stem for path in _folder(kind).glob("*.yaml"))


def read_table(kind: Kind, name: str) -> tuple[dict[str, Any], str]:
    """A table, and the name of its file for messages.

    Args:
        name: of a table that comes with ds_hybrid, or the path of one, YAML or JSON; a folder with a config.json too.

    Raises:
        ConfigError: there is no such table, or it is no mapping.
    """
    path = Path(name)
    shipped = _folder(kind) / f"{name}.yaml"
    if path.is_dir() and (path / "config.json").exists():
        path = path / "config.json"
    elif not path.is_file() and shipped.is_file():
        path = shipped
    elif not path.is_file():
        names = table_names(kind)
        raise ConfigError(
            f"{name}: neither a file nor one of the {kind} {', '.join(names)}.{did_you_mean(name, names)}"
        )
    text = read_text(path, ConfigError)
    try:
        table = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno}: {error.msg}. Write JSON.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}: line {line}: {error.problem}. Write YAML or JSON.") from None
    except yaml.YAMLError:
        raise ConfigError(f"{path}: not a text of YAML or JSON. Give a config.json, or a table of this form.") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: must hold keys and values, not a {type(table).__name__}.")
    return table, str(path)


def _folder(kind: Kind) -> Path:
    folder = _CHECKOUT / kind
    return folder if folder.is_dir() else _INSTALLED / kind
