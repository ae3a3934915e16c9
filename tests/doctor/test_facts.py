"""Facts travel as one line among others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hybrid.doctor.facts import Lock, NoFacts, from_output, to_line
from ds_hybrid.observe.nvlink import GpuUse, NotAvailable
from tests.doctor.stand_ins import made_facts, made_gpu_facts

FACTS = made_gpu_facts(
    "g0",
    [["X", "NV18"], ["NV18", "X"]],
    [0, 1],
    locks=(Lock("/ext/op/lock", "1:2", True),),
    nvlink_use={0: GpuUse("NVML", 1.0, 5.0, 0.5, None), 1: NotAvailable("it has no NVLink")},
)


@pytest.mark.parametrize("facts", [FACTS, made_facts(failure="ImportError: no", accelerator=None, addresses=())])
def test_round_trip(facts: object) -> None:
    line = to_line(facts)  # type: ignore[arg-type]
    assert "\n" not in line
    assert from_output(f"Welcome!\n{line}\nlogout\n") == facts


def test_a_host_whose_version_asks_for_fewer_packages() -> None:
    known = {name: found for name, found in FACTS.packages.items() if name != "peft"}
    assert from_output(to_line(replace(FACTS, packages=known))) == replace(FACTS, packages={**known, "peft": None})


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("", None),
        ("Welcome!\n", None),
        (
            to_line(FACTS).replace('"ninja"', '"nninja"'),
            NoFacts(True, "its ds_hybrid is another one, which answers in another form"),
        ),
        (to_line(FACTS)[:-9], NoFacts(True, "its ds_hybrid is another one, which answers in another form")),
    ],
)
def test_no_facts(output: str, answer: NoFacts | None) -> None:
    assert from_output(output) == answer
