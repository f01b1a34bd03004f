"""Text for a terminal, made of what others named and raised."""

from __future__ import annotations

from typing import Any


def printable(value: Any) -> Any:
    """``value``, a text or a list or dict of such, with escapes such as ``\\x1b`` for what would move a cursor, change
    colours or the direction of writing, or end a line."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c == "\u00a0" else c.encode("unicode_escape").decode() for c in value)
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable(item) for item in value]
    return value


def in_one_line(text: str) -> str:
    """``text`` with one space for each run of white space, and otherwise ``printable``."""
    return printable(" ".join(text.split()))


def unexpected(error: BaseException) -> str:
    """An error that nobody foresaw: its type, the place that raised it, and the first line of what it says."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else "unknown place"
    text = str(error).strip().splitlines()
    return f"unexpected {type(error).__name__} at {place}: {text[0] if text else ''}"
