"""Hugging Face's Trainer and Accelerate train through ds_hybrid, by one call before them.

Accelerate builds the engine itself: ``Accelerator._prepare_deepspeed`` calls ``deepspeed.initialize``. While switched
on, that call reaches ``ds_hybrid.initialize``, and an Accelerator that got an engine so gives the experts of all ranks
in ``get_state_dict``. To everybody else ``deepspeed.initialize`` stays what it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType, TracebackType
from typing import Any

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from packaging.version import Version
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ds_hybrid.engine.engine import MoEEngine
from ds_hybrid.engine.expert_layout import expert_group_sizes
from ds_hybrid.engine.initialize import initialize
from ds_hybrid.engine.parameter_groups import follow_split
from ds_hybrid.errors import ConfigError
from ds_hybrid.moe.autoep import HybridAutoEPLayer
from ds_hybrid.moe.kinds import MoELayer

KNOWN = MappingProxyType({"accelerate": ("1.15.0", "1.16"), "transformers": ("5.8.0", "5.25")})
"""The versions that :func:`use_with_accelerate` accepts: from the first up to and without the second."""

_PREPARE = "_prepare_deepspeed"


class _Replacement:
    """``_prepare_deepspeed`` of a class, replaced. While no switch is on, the new method does what the old one did."""

    def __init__(self, accelerator_class: type) -> None:
        self.switches: set[AccelerateSwitch] = set()
        self.original: Callable[..., tuple[Any, ...]] = getattr(accelerator_class, _PREPARE)
        self.method = _preparing(self.original, self.switches)
        self.method._ds_hybrid = self  # type: ignore[attr-defined]
        setattr(accelerator_class, _PREPARE, self.method)


class AccelerateSwitch:
    """Accelerate switched to ds_hybrid; ``off()``, or the end of a ``with`` block, switches back.

    Several may be on. Accelerate goes back when the last of them is off.
    """

    def __init__(self, accelerator_class: type) -> None:
        self._class = accelerator_class
        self._replacement = _replacement_in(accelerator_class) or _Replacement(accelerator_class)
        self._replacement.switches.add(self)

    def off(self) -> None:
        """Give Accelerate its own method back. Engines that exist stay as they are, and their Accelerators too.

        Who has replaced the method since keeps it; what it calls is Accelerate's own then.
        """
        replaced = self._replacement
        replaced.switches.discard(self)
        if not replaced.switches and getattr(self._class, _PREPARE) is replaced.method:
            setattr(self._class, _PREPARE, replaced.original)

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

    missing = [name for name in (_PREPARE, "get_state_dict") if not callable(getattr(Accelerator, name, None))]
    if missing:
        raise ConfigError(
            f"accelerate {version('accelerate')}: Accelerator has no {' and no '.join(missing)}, which ds_hybrid "
            f"replaces. Install accelerate {_range(*KNOWN['accelerate'])}."
        )
    return AccelerateSwitch(Accelerator)


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
    if Version(found).is_prerelease:
        problem = "is a prerelease"
    elif not Version(low) <= Version(found) < Version(high):
        problem = "is not known"
    else:
        return
    yield (
        f"{package} {found}: {problem}. use_with_accelerate() replaces methods of Accelerate and knows releases of "
        f"{package} {_range(low, high)}. Install one of these, or call ds_hybrid.initialize in a loop of your own."
    )


def _range(low: str, high: str) -> str:
    return f">={low},<{high}"


def _replacement_in(accelerator_class: type) -> _Replacement | None:
    found: _Replacement | None = getattr(getattr(accelerator_class, _PREPARE), "_ds_hybrid", None)
    return found


def _preparing(
    original: Callable[..., tuple[Any, ...]], switches: set[AccelerateSwitch]
) -> Callable[..., tuple[Any, ...]]:
    @functools.wraps(original)
    def prepare_deepspeed(self: Any, *args: Any) -> tuple[Any, ...]:
        if not switches:
            return original(self, *args)
        ds_config = self.deepspeed_plugin.deepspeed_config
        for model in args:
            if isinstance(model, nn.Module):
                _check_accelerator(self, model, ds_config)
        with _sections_hidden(ds_config) as sections, _initialize_replaced(ds_config, sections):
            prepared = original(self, *args)
        for engine in prepared:
            if isinstance(engine, DeepSpeedEngine) and not any(engine is arg for arg in args):
                _adopt(self, args, engine)
        return prepared

    return prepare_deepspeed


@contextmanager
def _sections_hidden(ds_config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """While open, ours and AutoEP's are not there: Accelerate takes each "auto" for a blank that it must fill."""
    sections: dict[str, Any] = {
        name: ds_config.pop(name) for name in ("expert_parallel", "ds_hybrid") if name in ds_config
    }
    try:
        yield sections
    finally:
        ds_config |= sections


@contextmanager
def _initialize_replaced(ds_config: dict[str, Any], sections: dict[str, Any]) -> Iterator[None]:
    """While open, ``deepspeed.initialize`` with Accelerate's ds_config is ``ds_hybrid.initialize`` with all of it."""
    original = deepspeed.initialize

    def initialize_with_sections(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if kwargs.get("config_params") is not ds_config:
            return original(*args, **kwargs)
        return initialize(*args, **{**kwargs, "config_params": {**ds_config, **sections}})

    deepspeed.initialize = initialize_with_sections
    try:
        yield
    finally:
        deepspeed.initialize = original


def _adopt(accelerator: Any, args: Sequence[Any], engine: DeepSpeedEngine) -> None:
    """Bind an engine that was just built to its Accelerator and schedulers; one that will not do is destroyed."""
    problem = None
    if not isinstance(engine, MoEEngine):
        problem = (
            f"accelerate {version('accelerate')}: its engine is DeepSpeed's own, built without deepspeed.initialize or "
            "with a ds_config other than the Accelerator's. Install accelerate "
            f"{_range(*KNOWN['accelerate'])}, and leave out what else replaces {_PREPARE} or deepspeed.initialize."
        )
    elif engine.group_origins is not None and _has_lost_scheduler(args, engine.group_origins):
        problem = (
            "accelerator.prepare: the optimizer has a torch scheduler that is not among the arguments, and the engine "
            "has split its groups. Pass both in one call, "
            "prepare(model, optimizer, scheduler), or make the scheduler afterwards, of the optimizer that it returns."
        )
    if problem is not None:
        engine.destroy()
        raise ConfigError(problem)
    _lead_schedulers(args, engine)
    accelerator.get_state_dict = _gathering(accelerator.get_state_dict)


def _has_lost_scheduler(args: Sequence[Any], origins: Sequence[int]) -> bool:
    """Whether a scheduler drives a prepared optimizer's groups and will not hear that they were split."""
    return list(origins) != list(range(len(origins))) and any(
        hasattr(optimizer.step, "_wrapped_by_lr_sched")  # torch's mark
        and not any(getattr(arg, "optimizer", None) is optimizer for arg in args)
        for optimizer in args
        if isinstance(optimizer, Optimizer)
    )


def _check_accelerator(accelerator: Any, model: nn.Module, ds_config: Mapping[str, Any]) -> None:
    if accelerator.fp8_backend == "MSAMP":
        raise ConfigError(
            "fp8 backend MSAMP: MS-AMP builds the engine without deepspeed.initialize, so it would not be ds_hybrid's. "
            "Leave it out (mixed_precision and kwargs_handlers of the Accelerator)."
        )
    sizes = expert_group_sizes(model, ds_config)
    if sizes and not accelerator.even_batches:
        raise ConfigError(
            f"even_batches = False: ranks could get different numbers of batches, and with experts on {sizes[-1]} "
            "ranks every forward is an exchange between them, in evaluation too. Leave even_batches at True "
            "(accelerator_config of TrainingArguments, or DataLoaderConfiguration)."
        )


def _lead_schedulers(prepared: Sequence[Any], engine: MoEEngine) -> None:
    """Schedulers of the optimizer that was prepared with them drive the groups that the engine has cut from its own."""
    for scheduler in prepared:
        client: Any = getattr(scheduler, "optimizer", None)
        if (
            isinstance(scheduler, LRScheduler)
            and scheduler is not engine.client_lr_scheduler
            and any(client is part for part in prepared)
            and engine.group_origins is not None
        ):
            follow_split(scheduler, engine.group_origins)
            # Another optimizer's where Accelerate has put DeepSpeed's for the CPU in its place.
            client.param_groups = engine.basic_optimizer.param_groups


def _gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_state_dict(model: Any, unwrap: bool = True) -> dict[str, Tensor]:
        if not (isinstance(model, MoEEngine) and model.moe_layers_by_name()):
            _refuse_a_part(model)
            return original(model, unwrap)
        if model.zero_optimization_partition_weights() and not model.zero_gather_16bit_weights_on_model_save():
            # Trainer takes this very error as a sign to save a checkpoint instead.
            raise ValueError(
                "zero_optimization.stage3_gather_16bit_weights_on_model_save = false: the weights are not gathered. "
                "Set it to true, or save a checkpoint and run `ds_hybrid export` on it."
            )
        return model.whole_state_dict()

    return get_state_dict


def _refuse_a_part(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, HybridAutoEPLayer) or (isinstance(layer, MoELayer) and layer.ep_size > 1):
            raise ConfigError(
                f"get_state_dict({type(model).__name__}): the bare model has 1/{layer.ep_size} of the experts of "
                f"{layer.layer_name} on this rank, and converted layers by AutoEP's names. Give it what "
                "accelerator.prepare returned for the model, on every rank."
            )
