"""MoE training on DeepSpeed: expert dispatch that moves fewer bytes, on one changed line.

Public names are imported on first use, so ``import ds_hybrid`` loads neither torch nor deepspeed.
"""

from importlib import import_module
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_hybrid.config import HybridConfig
    from ds_hybrid.dispatch.routing import Routing
    from ds_hybrid.engine.engine import MoEEngine
    from ds_hybrid.engine.initialize import initialize
    from ds_hybrid.errors import (
        CheckpointError,
        ConfigError,
        DispatchError,
        HybridError,
        PlacementError,
        TopologyError,
    )
    from ds_hybrid.hf.trainer import use_with_accelerate
    from ds_hybrid.moe.autoep import HybridAutoEPLayer
    from ds_hybrid.moe.layer import MoE
    from ds_hybrid.placement import ExpertPlacement

    __version__: str

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DispatchError",
    "ExpertPlacement",
    "HybridAutoEPLayer",
    "HybridConfig",
    "HybridError",
    "MoE",
    "MoEEngine",
    "PlacementError",
    "Routing",
    "TopologyError",
    "__version__",
    "initialize",
    "use_with_accelerate",
]

_HOMES = MappingProxyType(
    {
        "CheckpointError": "ds_hybrid.errors",
        "ConfigError": "ds_hybrid.errors",
        "DispatchError": "ds_hybrid.errors",
        "ExpertPlacement": "ds_hybrid.placement",
        "HybridAutoEPLayer": "ds_hybrid.moe.autoep",
        "HybridConfig": "ds_hybrid.config",
        "HybridError": "ds_hybrid.errors",
        "MoE": "ds_hybrid.moe.layer",
        "MoEEngine": "ds_hybrid.engine.engine",
        "PlacementError": "ds_hybrid.errors",
        "Routing": "ds_hybrid.dispatch.routing",
        "TopologyError": "ds_hybrid.errors",
        "initialize": "ds_hybrid.engine.initialize",
        "use_with_accelerate": "ds_hybrid.hf.trainer",
    }
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("ds_hybrid")
    if name not in _HOMES:
        raise AttributeError(f"module 'ds_hybrid' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
