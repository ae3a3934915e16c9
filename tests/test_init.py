"""The public names, and that they cost nothing before they are used."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import ds_hybrid

HEAVY_AFTER = "import sys; print(sorted({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"


@pytest.mark.parametrize(
    "code",
    [
        "import ds_hybrid",
        "import ds_hybrid; ds_hybrid.HybridConfig, ds_hybrid.ConfigError, ds_hybrid.__version__, dir(ds_hybrid)",
        "from ds_hybrid.config import load; load({'train_batch_size': 1, 'gradient_clipping': 0.0})",
        "import ds_hybrid.cli.main",
    ],
)
def test_neither_torch_nor_deepspeed_is_imported(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"{code}\n{HEAVY_AFTER}"], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["validate", "--help"],
        ["schema", "--help"],
        ["doctor", "--help"],
        ["export", "--help"],
        ["--version"],
    ],
)
def test_the_command_line_helps_without_them(arguments: list[str]) -> None:
    code = f"""
from ds_hybrid.cli.main import main
try:
    main({arguments})
except SystemExit as leaving:
    print(leaving.code)
{HEAVY_AFTER}"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n0\n[]\n")


def test_version_is_that_of_pyproject() -> None:
    assert ds_hybrid.__version__ == tomllib.loads(Path("pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("CheckpointError", "errors"),
        ("ConfigError", "errors"),
        ("DispatchError", "errors"),
        ("ExpertPlacement", "placement"),
        ("HybridAutoEPLayer", "moe.autoep"),
        ("HybridConfig", "config"),
        ("HybridError", "errors"),
        ("MoE", "moe.layer"),
        ("MoEEngine", "engine.engine"),
        ("PlacementError", "errors"),
        ("Routing", "dispatch.routing"),
        ("TopologyError", "errors"),
        ("initialize", "engine.initialize"),
        ("use_with_accelerate", "hf.trainer"),
    ],
)
def test_public_name(name: str, home: str) -> None:
    assert getattr(ds_hybrid, name) is getattr(import_module(f"ds_hybrid.{home}"), name)
    assert name in dir(ds_hybrid)
    assert name in ds_hybrid.__all__


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"^module 'ds_hybrid' has no attribute 'initialise'$"):
        ds_hybrid.initialise  # noqa: B018
