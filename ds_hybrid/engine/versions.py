"""Which versions of what ds_hybrid relies on it was tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

TESTED = MappingProxyType(
    {
        "deepspeed": ("0.19.8",),
        "torch": ("2.13.0",),
        "transformers": ("5.8.0", "5.24.0"),
        "accelerate": ("1.15.0",),
        "peft": ("0.21.2",),
    },
)
"""The versions that the tests ran with: all of them with the last ones, the presets and the Trainer with each."""


def untested_versions() -> list[str]:
    """One line for each installed package of another version. A package that is not installed is fine."""
    return [
        f"{package} {found} is untested; tested: {', '.join(tested)}."
        for package, tested in TESTED.items()
        if (found := _installed(package)) is not None and found.partition("+")[0] not in tested
    ]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
