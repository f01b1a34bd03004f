"""Quantities and reasons as people read them."""

from __future__ import annotations

import io
import re

from rich.console import Console, RenderableType


def plain_text(what: RenderableType, width: int) -> str:
    """What a terminal of so many columns would show, without colours."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(what)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def bytes_text(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if abs(count) >= 2**20 else f"{count / 2**10:.1f} KiB"


def error_text(value: float | None) -> str:
    """An error, of which the order of magnitude matters; None is one that was not finite."""
    return "not finite" if value is None else f"{value:.1e}"


def time_text(microseconds: float) -> str:
    """To three digits or so, in the unit that suits."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(microseconds) >= size:
            return f"{_digits(microseconds / size)} {unit}"
    return f"{_digits(microseconds)} µs"


def share_text(part: float, whole: float) -> str:
    """``part`` of ``whole`` in percent; empty where there is no whole."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else ""


def reason_kind(reason: str) -> str:
    """What reasons of one kind share: the part before a colon, without its numbers."""
    return re.sub(r"\d[\d.e+-]*", "#", reason.split(":")[0])


def _digits(value: float) -> str:
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"
