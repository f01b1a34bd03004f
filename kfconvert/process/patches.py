"""Temporary replacements of attributes of classes and modules during a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(places: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Context manager that sets each attribute (holder, name, value) to its value."""
    own = []
    try:
        for holder, name, value in places:
            own.append((holder, name, getattr(holder, name)))
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in own:
            setattr(holder, name, value)
