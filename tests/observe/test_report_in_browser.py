"""The report in Chromium: on a phone and a desk, light and dark, nothing sticks out, nothing is blank."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ds_hybrid.cli.main import main
from tests.observe.browser import Page, find_chromium, open_page, pixels
from tests.observe.runs import all_events, run_record, step_record, write_lines, write_run

pytest.importorskip("PIL", reason="pillow, which comes with matplotlib, reads the screenshots")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium: tests/observe/install_browser.sh installs it")
    with open_page(program, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("run"))
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


def overflowing(page: Page, width: int) -> list[str]:
    """What sticks out of the window and cannot be scrolled to inside its own box."""
    script = f"""[...document.body.querySelectorAll("*")]
        .filter(part => part.getBoundingClientRect().right > {width} + 1 && !part.closest(".scroll, svg"))
        .map(part => part.outerHTML.slice(0, 120))"""
    found = page.evaluate(script)
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    return list(found)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_shown_whole(page: Page, report: Path, width: int, dark: bool) -> None:
    page.show(report, width=width, dark=dark)
    assert overflowing(page, width) == []
    seen = pixels(page.screenshot())
    assert seen.shape[1] == width
    ground = np.median(seen.reshape(-1, 3), axis=0).mean()
    assert (ground < 60) if dark else (ground > 220)
    assert page.evaluate("document.querySelectorAll('main > section').length") == 8
    inside = {selector: boxes(page, selector) for selector in DRAWN}
    page.evaluate(f"document.querySelectorAll({', '.join(DRAWN)!r}).forEach(part => part.style.opacity = 0)")
    page.evaluate("document.querySelectorAll('.chips li').forEach(part => part.style.background = 'none')")
    without = pixels(page.screenshot())
    assert without.shape == seen.shape
    for selector, places in {**inside, ".chips li": boxes(page, ".chips li")}.items():
        assert len(places) == DRAWN.get(selector, 8), selector
        for place, is_in_view in places:
            if is_in_view:
                drawn = (seen[place] != without[place]).any(axis=2)
                assert drawn.sum() > LEAST_DRAWN, f"{selector} is blank at {place}"


DRAWN = {
    ".line path": 5,
    "image.cells": 2,
    "rect.kind-experts.span": 16,
    "rect.waiting": 40,
    "rect.sent": 2,
    "td.draw circle": 2,
    ".scale-bar": 1,
}
"""What is drawn without a letter, and how often."""

LEAST_DRAWN = 12
"""Pixels of the smallest of these: a wait of half a millisecond."""


def boxes(page: Page, selector: str) -> list[tuple[tuple[slice, slice], bool]]:
    """Rows and columns of the whole page's picture that the elements take, and whether no box has to be scrolled."""
    found = page.evaluate(f"""[...document.querySelectorAll({selector!r})].filter(part => part.checkVisibility()).map(
        part => {{ const box = part.getBoundingClientRect();
            const frame = (part.closest(".scroll") ?? document.body).getBoundingClientRect();
            return [box.top + scrollY, box.bottom + scrollY, box.left, box.right, frame.right]; }})""")
    return [
        (
            (slice(math.floor(top) - 1, math.ceil(bottom) + 1), slice(math.floor(left) - 1, math.ceil(right) + 1)),
            right <= edge,
        )
        for top, bottom, left, right, edge in found
    ]


def test_elements(page: Page, report: Path) -> None:
    page.show(report, width=1280)

    def count(selector: str) -> int:
        return int(page.evaluate(f"document.querySelectorAll({selector!r}).length"))

    assert count("h1") == 1
    assert count("main > section") == count("nav a") == 8
    assert count("#training article") == 5
    assert count("#load image") == 2
    assert count("#load g.mark.rebalance") == 1
    assert count("#load g.mark.dispatcher") == 1
    assert count("#timeline .lane") == 4
    assert count("#timeline .kind-experts.span") == 4 * 4
    assert count("#timeline rect.waiting") == 4 * 10
    assert count("#bytes .bar-row") == 2
    assert count("#rebalances tbody tr") == 1
    assert count("#placement .chips .came") == 2
    assert count("svg[role=img]:not([aria-label])") == 0
    assert page.evaluate("[...document.querySelectorAll('#load image')].every(image => image.getBBox().width > 100)")


def test_text_has_contrast(page: Page, report: Path) -> None:
    """WCAG's 4.5 of every text against its ground, in both schemes."""
    script = """(() => {
        const parts = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
        const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        const light = rgb => parts(rgb).map(v => linear(v / 255))
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
        const ground = part => { for (; part; part = part.parentElement) {
            const colour = getComputedStyle(part).backgroundColor;
            if (!colour.endsWith(", 0)")) return colour; } };
        return Math.min(...[...document.querySelectorAll("h1, h2, h3, p, dt, dd, td, th, a, strong, .sort, .sub, text")]
            .map(part => [part, getComputedStyle(part)])
            .map(([part, style]) => [light(part.closest("svg") ? style.fill : style.color), light(ground(part))])
            .map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)));
    })()"""
    for dark in (False, True):
        page.show(report, width=1280, dark=dark)
        assert page.evaluate(script) >= 4.5


def test_a_point_is_read_out(page: Page, report: Path) -> None:
    page.show(report, width=1280)
    page.evaluate("document.querySelector('#chart-loss').scrollIntoView()")
    box = page.evaluate("document.querySelector('#chart-loss svg').getBoundingClientRect().toJSON()")
    x, y = box["x"] + box["width"] * 0.41, box["y"] + box["height"] / 2
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    loss = step_record(30).loss
    assert page.evaluate("document.querySelector('#chart-loss output').textContent") == f"step 30: {loss:.3f}"


def test_nothing_is_fetched_and_nothing_complains(page: Page, report: Path) -> None:
    page.requests.clear()
    page.complaints.clear()
    page.show(report, width=390)
    assert {url.partition(":")[0] for url in page.requests} <= {"file", "data"}
    assert [url for url in page.requests if url.startswith("file:")] == [report.resolve().as_uri()]
    assert page.complaints == []


def test_a_hostile_name_stays_a_name(page: Page, tmp_path: Path) -> None:
    name = "<script>document.title='taken'</script>\"><img src=x onerror=\"document.title='taken'\">"
    folder = tmp_path / "run"
    folder.mkdir()
    records = [record for record in all_events() if record.step <= 20]
    for file, lines in (("events.jsonl", records), ("timeline.jsonl", [])):
        write_lines(folder / file, lines)
    text = (folder / "events.jsonl").read_text()
    quoted = name.replace('"', '\\"')
    (folder / "events.jsonl").write_text(text.replace("model.layers.0.mlp", quoted).replace("node-a", quoted))
    assert main(["report", str(folder)]) == 0
    page.show(folder / "report.html", width=390)
    assert page.evaluate("document.title") == "run - ds_hybrid report"
    assert page.evaluate("document.querySelectorAll('img, main script').length") == 0
    assert name in page.evaluate("document.querySelector('#load').textContent")
    assert overflowing(page, 390) == []


@pytest.mark.parametrize("case", ["no step", "one step", "torn", "many layers"])
def test_unusual_runs(page: Page, tmp_path: Path, case: str) -> None:
    records: list[object] = {
        "no step": [run_record()],
        "one step": [run_record(), step_record(10)],
        "torn": [run_record(), step_record(10), step_record(20)],
        "many layers": many_layers(),
    }[case]
    write_lines(tmp_path / "events.jsonl", records)
    if case == "torn":
        whole = (tmp_path / "events.jsonl").read_bytes()
        (tmp_path / "events.jsonl").write_bytes(whole[: -len(whole) // 9])
    assert main(["report", str(tmp_path)]) == 0
    page.show(tmp_path / "report.html", width=390)
    assert overflowing(page, 390) == []
    shown = page.evaluate("document.body.innerText")
    expected = {
        "no step": "No step was recorded",
        "one step": "1, each of 10 steps",
        "torn": "the last line is not whole",
        "many layers": "8 more layers",
    }
    assert expected[case] in shown
    assert re.search(r"\bnan\b|\bNone\b|Traceback", shown) is None


def many_layers() -> list[object]:
    """20 layers of 64 experts on 8 ranks of 2 hosts, 40 records."""
    draw = random.Random(3)
    names = [f"model.language_model.decoder.layers.{number}.block_sparse_moe" for number in range(20)]
    slots = tuple(tuple(range(8 * rank, 8 * rank + 8)) for rank in range(8))
    fact = run_record().layers[0].model_copy(update={"num_experts": 64, "ep_size": 8, "expert_of_slot": slots})
    groups = run_record().expert_groups[0].model_copy(update={"ep_size": 8, "ep_groups": (tuple(range(8)),)})
    run = run_record(
        world_size=8,
        node_of_rank=("gpu-node-with-a-long-name-01",) * 4 + ("gpu-node-with-a-long-name-02",) * 4,
        layers=tuple(fact.model_copy(update={"name": name}) for name in names),
        expert_groups=(groups,),
    )
    steps = []
    for step in range(10, 410, 10):
        made = step_record(step)
        layer = made.layers[0]
        layers = tuple(
            layer.model_copy(update={"name": name, "load": tuple(draw.randrange(50, 500) for _ in range(64))})
            for name in names
        )
        steps.append(made.model_copy(update={"layers": layers}))
    return [run, *steps]
