"""Elements of HTML and SVG as text. Whatever is not :class:`Markup` is escaped, so no name can become markup."""

from __future__ import annotations

from html import escape
from typing import Final

_VOID: Final = frozenset({"br", "hr", "link", "meta"})


class Markup(str):
    """Text that is markup already, and is put in as it is."""

    __slots__ = ()


def element(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """``<name attributes>children</name>``; children and attributes that are None are left out.

    Names of attributes are written with ``_`` for ``-``, and with one at the end where Python has the word
    (``class_``). Floats are rounded to three decimals.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{shown}>")
    return Markup(f"<{name}{shown}>{join(*children)}</{name}>")


def join(*children: str | None) -> Markup:
    """Children side by side."""
    return Markup("".join(str(_safe(child)) for child in children if child is not None))


def number(value: str | float) -> str:
    """An attribute's value: text as it is, numbers short."""
    if isinstance(value, str):
        return value
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def percent(fraction: float) -> str:
    """A place or a length in an SVG that fills its frame."""
    return number(100 * fraction) + "%"


def _safe(text: str) -> str:
    return text if isinstance(text, Markup) else escape(text, quote=False)
