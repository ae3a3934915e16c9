"""Lines, hints and the sentences that come from a model's JSON schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from ds_hybrid.problems import ABSENT, Problem, did_you_mean, listed, model_problems, show, unknown_key, value_at


class _Inner(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    colour: Literal["red", "green"] = "red"
    size: int = Field(default=1, ge=1)


class _Outer(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    inner: _Inner = _Inner()
    stage: int = Field(default=0, ge=0, le=3)
    ratio: float = Field(default=1, gt=0)
    switch: bool | Literal["auto"] = False
    label: str | None = None
    table: list[list[int]] = []
    required: Annotated[dict[str, Any], Field()]


@pytest.mark.parametrize(
    ("data", "path", "rule"),
    [
        ({"inner": {"colour": "gren"}}, "a.inner.colour", 'must be one of red, green. Did you mean "green"?'),
        ({"inner": {"colour": "xyz"}}, "a.inner.colour", "must be one of red, green."),
        ({"inner": {"colour": 3}}, "a.inner.colour", "must be one of red, green."),
        ({"inner": {"size": "1"}}, "a.inner.size", "must be an integer >= 1."),
        ({"inner": {"size": True}}, "a.inner.size", "must be an integer >= 1."),
        ({"inner": {"size": 0}}, "a.inner.size", "must be an integer >= 1."),
        ({"inner": 3}, "a.inner", "must be an object."),
        ({"inner": {"colr": 3}}, "a.inner.colr", 'unknown key. Did you mean "colour"?'),
        ({"inner": {"q": 3}}, "a.inner.q", "unknown key. Remove it."),
        ({"stage": 4}, "a.stage", "must be an integer from 0 to 3."),
        ({"stage": 1.0}, "a.stage", "must be an integer from 0 to 3."),
        ({"ratio": 0}, "a.ratio", "must be a number > 0."),
        ({"switch": 1}, "a.switch", 'must be true, false or "auto".'),
        ({"switch": "atuo"}, "a.switch", 'must be true, false or "auto". Did you mean "auto"?'),
        ({"label": 1}, "a.label", "must be a string or null."),
        ({"table": [[0, True]]}, "a.table", "must be a list of lists of integers."),
        ({"required": []}, "a.required", "must be an object."),
    ],
)
def test_each_rule_is_a_sentence(data: dict[str, Any], path: str, rule: str) -> None:
    assert [(problem.path, problem.rule) for problem in model_problems(_Outer, data, at="a")] == [(path, rule)]


def test_a_key_is_reported_once_with_its_whole_value() -> None:
    problems = model_problems(_Outer, {"table": [["a"], ["b"]]})
    assert problems == [Problem("table", "must be a list of lists of integers.", [["a"], ["b"]])]


def test_right_data_and_absent_keys_are_no_problem() -> None:
    assert model_problems(_Outer, {}) == []
    assert model_problems(_Outer, {"required": {}, "ratio": 2, "switch": "auto", "label": None, "table": [[1]]}) == []


def test_line() -> None:
    assert Problem("a.b", "must be 1.", None).line("x.json") == "a.b = null (x.json): must be 1."
    assert Problem("a.b", "missing.").line("x.json") == "a.b (x.json): missing."


def test_show_cuts_long_values_and_survives_what_json_cannot_say() -> None:
    assert show(list(range(100))) == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21..."
    assert show({"a": {1}}) == '{"a": "{1}"}'


def test_hints() -> None:
    assert listed(["auto", 3, None]) == '"auto", 3 or null'
    assert listed([False]) == "false"
    assert did_you_mean("allgatther", ["alltoall", "allgather"]) == ' Did you mean "allgather"?'
    assert did_you_mean("zzz", ["alltoall", "allgather"]) == ""
    assert unknown_key("a.satge", ["stage", "size"]) == Problem("a.satge", 'unknown key. Did you mean "stage"?')


@pytest.mark.parametrize(
    ("path", "value"), [("a.b", 1), ("n", None), ("a.c", ABSENT), ("a.b.c", ABSENT), ("z", ABSENT)]
)
def test_value_at(path: str, value: object) -> None:
    assert value_at({"a": {"b": 1}, "n": None}, path) is value
