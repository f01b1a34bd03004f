"""Readable text for quantities and reasons."""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console, RenderableType


def plain_text(what: RenderableType, width: int) -> str:
    """Renders ``what`` as text without colors, ``width`` columns wide."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(what)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def bytes_text(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if abs(count) >= 2**20 else f"{count / 2**10:.1f} KiB"


def error_text(value: float | None) -> str:
    """An error as text with its order of magnitude; None is an error that was not finite."""
    return "not finite" if value is None else f"{value:.1e}"


def time_text(microseconds: float) -> str:
    """A time with about three digits, in a suitable unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(microseconds) >= size:
            return f"{_digits(microseconds / size)} {unit}"
    return f"{_digits(microseconds)} µs"


def timing_text(timing: dict[str, Any]) -> str:
    """The median and the quartiles, with about three digits: ``38.8 ms (38.1 to 39.5)``."""
    unit, per_ms = ("ms", 1.0) if timing["median_ms"] >= 1 else ("µs", 1e3)
    median, q1, q3 = (_digits(per_ms * timing[key]) for key in ("median_ms", "q1_ms", "q3_ms"))
    return f"{median} {unit} ({q1} to {q3})"


def share_text(part: float, whole: float) -> str:
    """``part`` of ``whole`` in percent; "" if ``whole`` is 0."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else ""


def reason_kind(reason: str) -> str:
    """The kind of a reason: its text before the first colon, without numbers."""
    return re.sub(r"\d[\d.e+-]*", "#", reason.split(":")[0])


def _digits(value: float) -> str:
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"
