"""Works are noted in the steps whose timelines are wanted, and in no other."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.spans import SILENT
from ds_hybrid.engine.span_recorder import SpanRecorder
from ds_hybrid.observe.timeline import SpanColumns


@dataclass
class Layer:
    layer_name: str
    meter: Meter = field(default_factory=Meter)


class Attention:
    spans_of: Any = None


def named(columns: SpanColumns | None) -> list[tuple[str, int]]:
    assert columns is not None
    return [(columns.names[name], layer) for name, layer in zip(columns.name, columns.layer, strict=True)]


def test_nothing_is_noted_where_nothing_is_wanted() -> None:
    layers: Any = [Layer("a")]
    recorder = SpanRecorder(layers, nn.Linear(1, 1), None)
    recorder.watch(is_wanted=True)
    recorder.watch(is_wanted=False)
    with recorder.work("backward", "backward"), layers[0].meter.watched_by.work("router"):
        recorder.begin_forward()
        recorder.end_forward()
    assert layers[0].meter.watched_by is SILENT
    assert recorder.columns(since=time.perf_counter()) is None


def test_works_are_noted_with_their_layers_by_seconds_from_an_instant() -> None:
    layers: Any = [Layer("a"), Layer("b")]
    module, attention = nn.ModuleDict({"one": nn.Linear(1, 1), "two": nn.Linear(1, 1)}), Attention()
    shared: Any = attention
    recorder = SpanRecorder(layers, module, shared)
    recorder.watch(is_wanted=True)
    began = time.perf_counter()
    recorder.begin_forward()
    with layers[1].meter.watched_by.work("router"):
        time.sleep(0.01)
    for part in ("two", "one", "two"):
        with attention.spans_of(module[part]).work("attention_gather"):
            pass
    recorder.end_forward()
    with recorder.work("backward", "backward"):
        pass
    since = time.perf_counter()
    columns = recorder.columns(since=since)
    gathers = [("attention_gather", number) for number in (2, 3, 2)]
    assert named(columns) == [("router", 1), *gathers, ("forward", -1), ("backward", -1)]
    assert recorder.layer_names == ["a", "b", "two", "one"]
    assert columns is not None
    ends = columns.start_us + columns.us
    assert (columns.start_us >= 1e6 * (began - since) - 1).all()
    assert (ends <= 1).all()
    forward, router = 4, 0
    assert columns.start_us[forward] <= columns.start_us[router]
    assert ends[forward] >= ends[router] >= columns.start_us[router] + 10_000 - 1
    recorder.watch(is_wanted=True)
    assert named(recorder.columns(since=since)) == []


def test_an_error_in_a_work_ends_it() -> None:
    recorder = SpanRecorder([], nn.Linear(1, 1), None)
    recorder.watch(is_wanted=True)
    with pytest.raises(KeyError), recorder.work("optimizer", "step"):
        raise KeyError
    assert named(recorder.columns(since=time.perf_counter())) == [("optimizer", -1)]
