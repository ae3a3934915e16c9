"""Axes, numbers in words, pictures and markup of the report."""

from __future__ import annotations

import base64
import io
import math
from itertools import pairwise

import numpy as np
import pytest

from ds_hybrid.observe.report.markup import Markup, element, number
from ds_hybrid.observe.report.pixels import picture, scale_colours
from ds_hybrid.observe.report.scales import (
    axis,
    in_bytes,
    in_percent,
    in_seconds,
    significant,
    thinned,
    tick_labels,
    times,
)


@pytest.mark.parametrize(
    ("values", "options", "ticks"),
    [
        ([4.3, 5.3], {}, ["4.2", "4.4", "4.6", "4.8", "5.0", "5.2", "5.4"]),
        ([0.0, 2050.0], {"from_zero": True}, ["0", "500", "1,000", "1,500", "2,000", "2,500"]),
        ([1.12], {}, ["1.00", "1.05", "1.10", "1.15", "1.20", "1.25"]),
        ([10, 60], {"whole": True, "num_ticks": 5}, ["10", "20", "30", "40", "50", "60"]),
        ([7], {"whole": True}, ["6", "7", "8"]),
        ([0.0, 81_000.0], {"from_zero": True}, ["0", "20k", "40k", "60k", "80k", "100k"]),
        ([math.nan, math.inf, 3.0, 4.0], {}, ["3.0", "3.2", "3.4", "3.6", "3.8", "4.0"]),
        ([0.0, 1_580_000.0], {"from_zero": True}, ["0", "0.5M", "1.0M", "1.5M", "2.0M"]),
        ([10, 20_000], {"whole": True, "num_ticks": 5}, ["5k", "10k", "15k", "20k"]),
        ([], {}, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([0.0], {"from_zero": True}, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_ticks(values: list[float], options: dict[str, object], ticks: list[str]) -> None:
    made = axis(values, **options)  # type: ignore[arg-type]
    assert made.low < made.high
    assert all(made.low <= tick <= made.high for tick in made.ticks)
    shown = tick_labels(made.ticks)
    assert shown == ticks
    assert all(made.low <= value <= made.high for value in values if math.isfinite(value))


def test_places_on_an_axis() -> None:
    made = axis([0.0, 10.0], from_zero=True)
    assert [made.at(value) for value in (-5.0, 0.0, 2.5, 10.0, 11.0)] == [0.0, 0.0, 0.25, 1.0, 1.0]


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (significant(4.2951, 4), "4.295"),
        (significant(2050.3), "2,050"),
        (significant(0.00123), "0.00123"),
        (significant(math.nan), "\N{EN DASH}"),
        (in_bytes(352), "352 B"),
        (in_bytes(5909), "5.91 kB"),
        (in_bytes(1_200_000), "1.20 MB"),
        (in_bytes(8.08e16), "80.8 PB"),
        (in_bytes(999_999), "1.00 MB"),
        (in_seconds(0.00034), "340 \N{MICRO SIGN}s"),
        (in_seconds(0.0125), "12.5 ms"),
        (in_seconds(3.2), "3.20 s"),
        (in_seconds(250), "4 min 10 s"),
        (in_seconds(7380), "2 h 3 min"),
        (in_seconds(-0.002), "-2.00 ms"),
        (times(1.9186), "1.92\N{MULTIPLICATION SIGN}"),
        (in_percent(0.304), "30 %"),
        (in_percent(0.041), "4.1 %"),
        (number(-0.00001), "0"),
        (number(12.5), "12.5"),
    ],
)
def test_numbers_in_words(shown: str, text: str) -> None:
    assert shown == text


def test_thinned_lines_keep_ends_and_peaks() -> None:
    values = [math.sin(index / 50) for index in range(10_000)]
    values[4321] = 9.0
    kept = thinned(values, most=400)
    assert len(kept) <= 402
    assert {0, 4321, 9_999} <= set(kept)
    assert thinned([1.0, 2.0], most=400) == [0, 1]


def test_picture_shows_each_cell_in_its_colour() -> None:
    images = pytest.importorskip("PIL.Image")
    cells = np.array([[0.0, 1.0, math.nan], [2.0, 5.0, 0.5]])
    kind, _, data = picture(cells, 2.0).partition(",")
    assert kind == "data:image/png;base64"
    with images.open(io.BytesIO(base64.b64decode(data))) as image:
        shown = np.asarray(image.convert("RGBA"))
    colours = scale_colours()
    assert shown.shape == (2, 3, 4)
    assert tuple(shown[0, 0, :3]) == colours[0]
    assert tuple(shown[1, 0, :3]) == tuple(shown[1, 1, :3]) == colours[-1]
    assert tuple(shown[0, 1, :3]) == colours[round(63 * math.sqrt(1 / 2))]
    assert shown[0, 2, 3] == 0


def test_lightness_of_the_scale_only_rises() -> None:
    light = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in scale_colours()]
    assert all(after > before for before, after in pairwise(light))


def test_markup_escapes_whatever_is_not_markup() -> None:
    made = element("p", "<b>&", element("i", "x"), None, class_='a"b', stroke_width=1.50001, hidden=None)
    assert made == '<p class="a&quot;b" stroke-width="1.5">&lt;b&gt;&amp;<i>x</i></p>'
    assert element("p", Markup("<b></b>")) == "<p><b></b></p>"
