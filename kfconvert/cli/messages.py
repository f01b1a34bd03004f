"""Text for a terminal from untrusted names and errors."""

from __future__ import annotations

from typing import Any


def printable(value: Any) -> Any:
    """Escapes control characters (``\\x1b``) in ``value``, a text or a list or dict of texts: cursor movement, colors,
    writing direction and line ends."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c == "\u00a0" else c.encode("unicode_escape").decode() for c in value)
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable(item) for item in value]
    return value


def in_one_line(text: str) -> str:
    """Replaces each run of white space in ``text`` with one space, and escapes the rest with ``printable``."""
    return printable(" ".join(text.split()))


def unexpected(error: BaseException) -> str:
    """Describes an unexpected error: its type, the place that raised it, and the first line of its message."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else "unknown place"
    text = str(error).strip().splitlines()
    return f"unexpected {type(error).__name__} at {place}: {text[0] if text else ''}"
