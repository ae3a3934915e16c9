"""The pinned versions are the tested ones, and any other is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_hybrid import deepspeed_keys
from ds_hybrid.engine import versions


def test_constraints_pin_tested_versions() -> None:
    pins = dict(
        line.split("==")
        for line in (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    assert all(pins[package] in tested for package, tested in versions.TESTED.items())
    assert versions.TESTED["deepspeed"] == (deepspeed_keys.VERSION,)


def test_an_untested_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"deepspeed": "0.20.0", "torch": "2.13.0+cu130", "transformers": None, "peft": "0.22.0"}
    monkeypatch.setattr(versions, "_installed", found.get)
    assert versions.untested_versions() == [
        "deepspeed 0.20.0 is untested; tested: 0.19.8.",
        "peft 0.22.0 is untested; tested: 0.21.2.",
    ]
