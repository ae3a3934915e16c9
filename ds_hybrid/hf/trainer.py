"""Hugging Face's Trainer and Accelerate train through ds_hybrid, by one call before them.

Accelerate builds the engine itself: ``Accelerator._prepare_deepspeed`` calls ``deepspeed.initialize``. While switched
on, that call reaches ``ds_hybrid.initialize``, and ``Accelerator.get_state_dict`` gives the experts of all ranks. These
two methods are all that is replaced, and both come back when switched off. To everybody else ``deepspeed.initialize``
stays what it is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType, TracebackType
from typing import Any

import deepspeed
from deepspeed.utils import log_dist
from packaging.version import Version
from torch import Tensor

from ds_hybrid.engine.adapters import has_adapters
from ds_hybrid.engine.engine import MoEEngine, initialize
from ds_hybrid.errors import ConfigError

KNOWN = MappingProxyType({"accelerate": ("1.15.0", "1.16"), "transformers": ("5.8.0", "5.25")})
"""The versions that :func:`use_with_accelerate` accepts: from the first up to and without the second."""

_REPLACED = ("_prepare_deepspeed", "get_state_dict")


class AccelerateSwitch:
    """Accelerate switched to ds_hybrid; ``off()``, or the end of a ``with`` block, switches back.

    A switch made while another one is on changes nothing, and its ``off()`` neither.
    """

    def __init__(self, accelerator_class: type) -> None:
        self._class = accelerator_class
        self._originals: dict[str, Callable[..., Any]] = {}
        if not is_on(accelerator_class):
            prepare, get_state_dict = (getattr(accelerator_class, name) for name in _REPLACED)
            self._originals = dict(zip(_REPLACED, (prepare, get_state_dict), strict=True))
            for name, method in zip(_REPLACED, (_preparing(prepare), _gathering(get_state_dict)), strict=True):
                method._ds_hybrid = True  # type: ignore[attr-defined]
                setattr(accelerator_class, name, method)

    def off(self) -> None:
        """Give Accelerate its own methods back. Engines that exist stay as they are."""
        for name, method in self._originals.items():
            setattr(self._class, name, method)
        self._originals = {}

    def __enter__(self) -> AccelerateSwitch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.off()


def use_with_accelerate() -> AccelerateSwitch:
    """Let ``Trainer`` and ``Accelerator`` train through ds_hybrid from here on. Call it on every rank.

    It must come before ``trainer.train()`` or ``accelerator.prepare(...)``. All models prepared with a ds_config
    then get a :class:`MoEEngine`, one without MoE layers too.

    Raises:
        ConfigError: the versions of accelerate or transformers are not in :data:`KNOWN`, or lack what is replaced.
    """
    problems = [problem for package, (low, high) in KNOWN.items() for problem in _check_version(package, low, high)]
    if problems:
        raise ConfigError(*problems)
    from accelerate import Accelerator

    missing = [name for name in _REPLACED if not callable(getattr(Accelerator, name, None))]
    if missing:
        raise ConfigError(
            f"accelerate {version('accelerate')}: Accelerator has no {' and no '.join(missing)}, which ds_hybrid "
            f"replaces. Install accelerate {_range(*KNOWN['accelerate'])}."
        )
    return AccelerateSwitch(Accelerator)


def is_on(accelerator_class: type) -> bool:
    """Whether ``Accelerator`` is switched to ds_hybrid."""
    return hasattr(getattr(accelerator_class, _REPLACED[0]), "_ds_hybrid")


def engine_of(source: Any) -> MoEEngine:
    """The engine of a Trainer or an Accelerator. A callback gets the bare model, so give it the trainer.

    Raises:
        ConfigError: there is no engine yet, or it is not ds_hybrid's.
    """
    accelerator = getattr(source, "accelerator", source)
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapped is None:
        raise ConfigError(
            f"engine_of({type(source).__name__}): no engine yet. trainer.train() and accelerator.prepare(model) make "
            "it; ask from on_train_begin on."
        )
    if not isinstance(wrapped.engine, MoEEngine):
        raise ConfigError(
            f"engine_of({type(source).__name__}): the engine is DeepSpeed's own. Call ds_hybrid.use_with_accelerate() "
            "before the model is prepared."
        )
    return wrapped.engine


def _check_version(package: str, low: str, high: str) -> Iterator[str]:
    try:
        found = version(package)
    except PackageNotFoundError:
        if package == "accelerate":
            yield f"accelerate: not installed. Install accelerate {_range(low, high)}: pip install 'ds_hybrid[hf]'."
        return
    if Version(found).is_prerelease or not Version(low) <= Version(found) < Version(high):
        yield (
            f"{package} {found}: use_with_accelerate() replaces methods of Accelerate and knows {package} "
            f"{_range(low, high)}. Install one of these, or call ds_hybrid.initialize in a loop of your own."
        )


def _range(low: str, high: str) -> str:
    return f">={low},<{high}"


def _preparing(original: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    @functools.wraps(original)
    def prepare_deepspeed(self: Any, *args: Any) -> tuple[Any, ...]:
        with _section_hidden(self.deepspeed_plugin.deepspeed_config) as section, _initialize_replaced(section):
            prepared = original(self, *args)
        for engine in prepared:
            if isinstance(engine, deepspeed.DeepSpeedEngine):
                _check_engine(engine, even_batches=self.even_batches)
                self.get_state_dict = self.get_state_dict  # stays with this engine when switched off
        return prepared

    return prepare_deepspeed


@contextmanager
def _section_hidden(ds_config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """While open, our section is not there: Accelerate takes each "auto" in it for a blank that it must fill."""
    section = {"ds_hybrid": ds_config.pop("ds_hybrid")} if "ds_hybrid" in ds_config else {}
    try:
        yield section
    finally:
        ds_config |= section


@contextmanager
def _initialize_replaced(section: dict[str, Any]) -> Iterator[None]:
    """While open, ``deepspeed.initialize`` is ``ds_hybrid.initialize`` with our section."""

    def initialize_with_section(*, config_params: dict[str, Any], **kwargs: Any) -> tuple[Any, ...]:
        return initialize(config_params={**config_params, **section}, **kwargs)

    original = deepspeed.initialize
    deepspeed.initialize = initialize_with_section
    try:
        yield
    finally:
        deepspeed.initialize = original


def _check_engine(engine: Any, *, even_batches: bool) -> None:
    if not isinstance(engine, MoEEngine):
        raise ConfigError(
            f"accelerate {version('accelerate')} built the engine without calling deepspeed.initialize, so it is not "
            "ds_hybrid's. MS-AMP does so: leave it out."
        )
    collective = [name for name, layer in engine.moe_layers_by_name().items() if layer.ep_size > 1]
    if collective and not even_batches:
        raise ConfigError(
            f"even_batches = False: ranks could get different numbers of batches, and every forward of {collective[0]} "
            "is an exchange between ranks, in evaluation too. Leave even_batches at True (accelerator_config of "
            "TrainingArguments, or DataLoaderConfiguration)."
        )
    frozen = [name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad]
    if engine.zero_optimization_partition_weights() and any(".experts." in name for name in frozen):
        log_dist(
            "ds_hybrid: zero_optimization.stage = 3 and the experts are frozen: DeepSpeed cannot save checkpoints of "
            'that. Save with save_strategy="no" and save_model, or use stage 1 or 2.',
            ranks=[0],
            level=logging.WARNING,
        )


def _gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_state_dict(self: Any, model: Any, unwrap: bool = True) -> dict[str, Tensor]:
        if not (isinstance(model, MoEEngine) and model.moe_layers_by_name()):
            return original(self, model, unwrap)
        if model.zero_optimization_partition_weights() and not model.zero_gather_16bit_weights_on_model_save():
            # Trainer takes this very error as a sign to save a checkpoint instead.
            raise ValueError(
                "zero_optimization.stage3_gather_16bit_weights_on_model_save = false: the weights are not gathered. "
                "Set it to true, or save a checkpoint and run `ds_hybrid export` on it."
            )
        return model.whole_state_dict(exclude_frozen_parameters=has_adapters(model.module))

    return get_state_dict
