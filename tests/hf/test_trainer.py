"""Switching Accelerate to ds_hybrid and back, and what is refused. Trainings are in tests/multirank/test_trainer.py."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import deepspeed
import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils.dataclasses import FP8BackendType
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from deepspeed.runtime.engine import DeepSpeedEngine
from packaging.requirements import Requirement
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer

import ds_hybrid
from ds_hybrid.engine.parameter_groups import split_optimizer
from ds_hybrid.errors import ConfigError
from ds_hybrid.hf import trainer
from ds_hybrid.hf.trainer import engine_of, use_with_accelerate

SOURCES = {
    # The first calls deepspeed.initialize, looked up when it runs, and puts the engine in its result.
    "Accelerator._prepare_deepspeed": (Accelerator._prepare_deepspeed, "32d86ff7e08a1f2d"),
    "Accelerator.get_state_dict": (Accelerator.get_state_dict, "d3650a99fc23916c"),
    # Tells the engine where a step ends, and steps only there: engine.move_experts counts on that.
    "DeepSpeedEngineWrapper.backward": (DeepSpeedEngineWrapper.backward, "0185cad8f450094b"),
}


SAVE_MODEL = ("ca8d2be9f60f9878", "705727ee10c8f24f")
"""``Trainer.save_model`` of transformers 5.8.0 and 5.24.0."""


@pytest.mark.parametrize("name", SOURCES)
def test_accelerates_source_is_the_one_that_was_read(name: str) -> None:
    function, expected = SOURCES[name]
    assert hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16] == expected


def test_the_trainers_saving_is_the_one_that_was_read() -> None:
    """It takes a ValueError for weights that are not gathered, and asks PEFT's models at ZeRO 3 another way."""
    source = inspect.getsource(Trainer.save_model)
    assert hashlib.sha256(source.encode()).hexdigest()[:16] in SAVE_MODEL


def is_on() -> bool:
    replaced = trainer._replacement_in(Accelerator)
    return replaced is not None and bool(replaced.switches)


HIDDEN = {"expert_parallel", "ds_hybrid"}


def methods() -> list[Callable[..., Any]]:
    return [Accelerator._prepare_deepspeed, Accelerator.get_state_dict, deepspeed.initialize]


def test_on_and_off() -> None:
    before = methods()
    switch = ds_hybrid.use_with_accelerate()
    assert is_on()
    assert [now is then for now, then in zip(methods(), before, strict=True)] == [False, True, True]
    switch.off()
    assert methods() == before
    switch.off()
    assert methods() == before
    assert not is_on()


def test_a_block_ends_it_whatever_happens() -> None:
    before = methods()
    with pytest.raises(KeyError), use_with_accelerate():
        raise KeyError
    assert methods() == before


def test_a_second_switch_leaves_the_first_alone() -> None:
    before = methods()
    with use_with_accelerate():
        on = methods()
        with use_with_accelerate():
            assert methods() == on
        assert methods() == on
    assert methods() == before


def test_a_block_stays_on_when_an_outer_switch_goes_off() -> None:
    before = methods()
    outer = use_with_accelerate()
    with use_with_accelerate():
        outer.off()
        assert is_on()
        assert methods() != before
    assert methods() == before


class Unprepared:
    """What of an Accelerator is looked at before there is an engine."""

    def __init__(self, *, even_batches: bool = True, fp8_backend: FP8BackendType = FP8BackendType.NO) -> None:
        config = {
            "zero_optimization": {"stage": 1},
            "expert_parallel": {"enabled": True, "autoep_size": 2, "score_apply": "auto"},
            "ds_hybrid": {"dispatch": {"mode": "auto"}},
        }
        self.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=config)
        self.even_batches = even_batches
        self.fp8_backend = fp8_backend


@pytest.mark.parametrize("marked", [True, False], ids=["functools.wraps", "bare"])
def test_who_replaced_the_method_later_keeps_it(monkeypatch: pytest.MonkeyPatch, marked: bool) -> None:
    """And calls Accelerate's own when the switch is off, ours again when one is on."""
    sections: list[bool] = []

    def prepare(self: Any, *args: Any) -> tuple[Any, ...]:
        sections.append("ds_hybrid" in self.deepspeed_plugin.deepspeed_config)
        return args

    monkeypatch.setattr(Accelerator, "_prepare_deepspeed", prepare)
    switch = use_with_accelerate()
    ours = Accelerator._prepare_deepspeed

    def foreign(self: Any, *args: Any) -> tuple[Any, ...]:
        return ours(self, *args)

    if marked:
        foreign = functools.wraps(ours)(foreign)
    Accelerator._prepare_deepspeed = foreign
    Accelerator._prepare_deepspeed(Unprepared())
    switch.off()
    assert Accelerator._prepare_deepspeed is foreign
    assert not is_on()
    Accelerator._prepare_deepspeed(Unprepared())
    with use_with_accelerate():
        assert is_on()
        Accelerator._prepare_deepspeed(Unprepared())
    Accelerator._prepare_deepspeed(Unprepared())
    assert sections == [False, True, False, True]
    Accelerator._prepare_deepspeed = ours
    use_with_accelerate().off()
    assert Accelerator._prepare_deepspeed is prepare


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"even_batches": False}, r"^even_batches = False: .* with experts on 2 ranks every forward is an exchange"),
        ({"fp8_backend": FP8BackendType.MSAMP}, r"^fp8 backend MSAMP: MS-AMP builds the engine without"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], message: str
) -> None:
    built = []

    def prepare(self: Any, *args: Any) -> tuple[Any, ...]:
        built.append(args)
        return args

    monkeypatch.setattr(Accelerator, "_prepare_deepspeed", prepare)
    with use_with_accelerate():
        with pytest.raises(ConfigError, match=message):
            Accelerator._prepare_deepspeed(Unprepared(**setting), nn.Linear(2, 2))
        assert built == []
        Accelerator._prepare_deepspeed(Unprepared(**setting), "a dataloader")  # before the model, or without one
    assert built == [("a dataloader",)]


class Foreign(DeepSpeedEngine):
    """An engine as DeepSpeed's ``initialize`` makes it, as far as it is looked at."""

    def __init__(self, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        self.is_destroyed = False

    def destroy(self) -> None:
        self.is_destroyed = True


def test_an_engine_of_deepspeeds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when Accelerate passes a copy of its ds_config. One that was there before is not looked at."""
    built: list[Foreign] = []

    def initialize(**kwargs: Any) -> tuple[Any, ...]:
        built.append(Foreign(**kwargs))
        return built[-1], None, None, None

    def prepare(self: Any, *args: Any) -> tuple[Any, ...]:
        if isinstance(args[0], DeepSpeedEngine):
            return args
        return deepspeed.initialize(model=args[0], config_params=dict(self.deepspeed_plugin.deepspeed_config))

    monkeypatch.setattr(Accelerator, "_prepare_deepspeed", prepare)
    monkeypatch.setattr(deepspeed, "initialize", initialize)
    with use_with_accelerate():
        message = rf"^accelerate {accelerate.__version__}: its engine is DeepSpeed's own, built without"
        with pytest.raises(ConfigError, match=message):
            Accelerator._prepare_deepspeed(Unprepared(), nn.Linear(2, 2))
        assert [engine.is_destroyed for engine in built] == [True]
        before = Foreign()
        assert Accelerator._prepare_deepspeed(Unprepared(), before) == (before,)
        assert not before.is_destroyed


def test_others_who_build_meanwhile_reach_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def note(name: str) -> Callable[..., tuple[Any, ...]]:
        def initialize(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            reached.append((name, args, kwargs))
            return ()

        return initialize

    def prepare(self: Any, *args: Any) -> tuple[Any, ...]:
        ds_config = self.deepspeed_plugin.deepspeed_config
        deepspeed.initialize(None, "theirs", config={"train_batch_size": 1})
        deepspeed.initialize(config_params=dict(ds_config))
        deepspeed.initialize(model="ours", config_params=ds_config)
        return args

    monkeypatch.setattr(Accelerator, "_prepare_deepspeed", prepare)
    monkeypatch.setattr(deepspeed, "initialize", note("deepspeed"))
    monkeypatch.setattr(trainer, "initialize", note("ds_hybrid"))
    unprepared = Unprepared()
    ds_config = unprepared.deepspeed_plugin.deepspeed_config
    with use_with_accelerate():
        Accelerator._prepare_deepspeed(unprepared)
    without = {key: value for key, value in ds_config.items() if key not in HIDDEN}
    assert reached == [
        ("deepspeed", (None, "theirs"), {"config": {"train_batch_size": 1}}),
        ("deepspeed", (), {"config_params": without}),
        ("ds_hybrid", (), {"model": "ours", "config_params": ds_config}),
    ]


def test_everything_comes_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate does not see our sections meanwhile: it would fill each "auto"."""
    seen = []

    def prepare(self: Any, *args: Any) -> tuple[Any, ...]:
        seen.extend([dict(self.deepspeed_plugin.deepspeed_config), deepspeed.initialize is original])
        raise RuntimeError("no engine")

    original = deepspeed.initialize
    monkeypatch.setattr(Accelerator, "_prepare_deepspeed", prepare)
    unprepared = Unprepared()
    before = copy.deepcopy(unprepared.deepspeed_plugin.deepspeed_config)
    with use_with_accelerate(), pytest.raises(RuntimeError, match="no engine"):
        Accelerator._prepare_deepspeed(unprepared)
    assert seen == [{key: value for key, value in before.items() if key not in HIDDEN}, False]
    assert unprepared.deepspeed_plugin.deepspeed_config == before
    assert before.keys() >= HIDDEN
    assert deepspeed.initialize is original


def test_the_scripts_scheduler_drives_the_optimizer_that_accelerate_puts_in_place_of_the_scripts() -> None:
    """With offload, DeepSpeed's for the CPU, made from the groups of the script's."""
    dense, expert = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    expert.allreduce, expert.group_name = False, "ep_size_2"  # type: ignore[attr-defined]
    client = torch.optim.AdamW([dense, expert], lr=1.0)
    scheduler = LambdaLR(client, lambda step: 0.5**step)
    in_place = torch.optim.AdamW(client.param_groups)
    origins = split_optimizer(in_place, None, trainable_only=True)
    engine: Any = SimpleNamespace(group_origins=origins, client_lr_scheduler=None, basic_optimizer=in_place)
    trainer._lead_schedulers((client, scheduler), engine)
    scheduler.step()
    assert [group["lr"] for group in in_place.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("origins", "with_scheduler", "is_lost"),
    [([0, 0], False, True), ([0, 0], True, False), ([0], False, False)],
    ids=["split", "passed along", "whole"],
)
def test_a_scheduler_that_was_not_passed_along(origins: list[int], with_scheduler: bool, is_lost: bool) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    assert not trainer._has_lost_scheduler((optimizer,), origins)  # none yet: it will be made of the split groups
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    args = (optimizer, scheduler) if with_scheduler else (optimizer,)
    assert trainer._has_lost_scheduler(args, origins) == is_lost


def test_the_extra_installs_what_is_known() -> None:
    """As the message without accelerate says."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    requirements = {
        parsed.name: parsed.specifier for parsed in map(Requirement, project["optional-dependencies"]["hf"])
    }
    for package, (low, high) in trainer.KNOWN.items():
        assert low in requirements[package]
        assert high not in requirements[package]
        assert {specifier.operator for specifier in requirements[package]} == {">=", "<"}
    assert "packaging" in {Requirement(line).name for line in project["dependencies"]}


@pytest.mark.parametrize(("package", "found"), [("accelerate", "1.15.1"), ("transformers", "5.10.0")])
def test_versions_between_the_tested_ones_are_accepted(
    monkeypatch: pytest.MonkeyPatch, package: str, found: str
) -> None:
    versions = {"accelerate": "1.15.0", "transformers": "5.24.0", package: found}
    monkeypatch.setattr(trainer, "version", versions.__getitem__)
    with use_with_accelerate():
        assert is_on()


@pytest.mark.parametrize(
    ("package", "found", "problem"),
    [
        ("accelerate", "1.14.0", "is not known"),
        ("accelerate", "1.16.0", "is not known"),
        ("transformers", "5.7.9", "is not known"),
        ("transformers", "5.25.0rc1", "is a prerelease"),
        ("transformers", "5.10.0rc1", "is a prerelease"),
    ],
)
def test_unknown_versions_are_refused(monkeypatch: pytest.MonkeyPatch, package: str, found: str, problem: str) -> None:
    versions = {"accelerate": "1.15.0", "transformers": "5.24.0", package: found}
    monkeypatch.setattr(trainer, "version", versions.__getitem__)
    low, high = trainer.KNOWN[package]
    message = rf"^{package} {found}: {problem}\. .* knows releases of {package} >={low},<{high}\. Install one of these"
    with pytest.raises(ConfigError, match=message):
        use_with_accelerate()
    assert not is_on()


def test_an_accelerate_without_the_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Accelerator, "_prepare_deepspeed")
    with pytest.raises(
        ConfigError, match=rf"^accelerate {accelerate.__version__}: Accelerator has no _prepare_deepspeed"
    ):
        use_with_accelerate()


def test_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise trainer.PackageNotFoundError(package)

    monkeypatch.setattr(trainer, "version", version)
    with pytest.raises(ConfigError, match=r"^accelerate: not installed\. .*pip install 'ds_hybrid\[hf\]'\.$"):
        use_with_accelerate()


class Prepared:
    """What of an Accelerator ``engine_of`` looks at."""

    def __init__(self, engine: Any) -> None:
        self.deepspeed_engine_wrapped = None if engine is None else DeepSpeedEngineWrapper(engine)


def test_no_engine_of_ours() -> None:
    with pytest.raises(ConfigError, match=r"^engine_of\(Prepared\): no engine yet"):
        engine_of(Prepared(None))
    with pytest.raises(ConfigError, match=r"^engine_of\(Prepared\): the engine is DeepSpeed's own\. Call ds_hybrid"):
        engine_of(Prepared(object()))
