"""The report's colours: on light and dark pages, and in pictures. report.css says where they go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Colour(NamedTuple):
    """On a light ground, which pictures have too, and on a dark one."""

    light: str
    dark: str


SPANS: Final[Mapping[str, Colour]] = {
    "router": Colour("#e0a100", "#f0b429"),
    "plan": Colour("#8c6bb1", "#b39ddb"),
    "dispatch": Colour("#1f6fb8", "#5b9fe8"),
    "experts": Colour("#1a8a66", "#3fb98b"),
    "combine": Colour("#4fb3e8", "#86cdf5"),
    "attention_gather": Colour("#c46a9b", "#e39ac0"),
}
"""Of the work inside a layer, in the order in which it is told."""

COLOURS: Final[Mapping[str, Colour]] = {
    "page": Colour("#f6f7f9", "#10141b"),
    "card": Colour("#ffffff", "#181e27"),
    "ink": Colour("#1a2230", "#e8ecf2"),
    "soft": Colour("#56606f", "#a3adbb"),
    "line": Colour("#dde1e8", "#2c3542"),
    "grid": Colour("#e6e9ee", "#262e3a"),
    "accent": Colour("#2457a8", "#8ab4f8"),
    "line-0": Colour("#2457a8", "#8ab4f8"),
    "line-1": Colour("#b3541e", "#f2a36b"),
    "problem": Colour("#b3261e", "#ff8a80"),
    "advice": Colour("#8a5a00", "#f5c251"),
    "note": Colour("#2457a8", "#8ab4f8"),
    "other": Colour("#9aa3b0", "#78828f"),
    "hatch": Colour("#c62828", "#ff7568"),
    "lane": Colour("#f0f2f5", "#202733"),
    "whole": Colour("#b9c0cb", "#465061"),
    "whole-backward": Colour("#8f98a6", "#626d7f"),
    "filled": Colour("#a9d5c6", "#28523f"),
    "rebalance": Colour("#c2410c", "#ff9d5c"),
    "dispatcher": Colour("#6b4fa0", "#b8a1e3"),
    **SPANS,
}


def kind_class(span: str) -> str:
    """The class of a span inside a layer, which sets its colour."""
    return f"kind-{span if span in SPANS else 'other'}"


def stylesheet() -> str:
    """The colours as variables of CSS, ``--page`` and so on, by the reader's scheme; a class for each kind of span."""
    light, dark = (" ".join(f"--{name}: {colour[scheme]};" for name, colour in COLOURS.items()) for scheme in range(2))
    kinds = "\n".join(f".{kind_class(name)} {{ --fill: var(--{name}); }}" for name in [*SPANS, "other"])
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{kinds}\n"
    )
