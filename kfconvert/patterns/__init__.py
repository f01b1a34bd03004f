"""The registry of fusions: every ``PATTERNS`` tuple of the files in this package. Adding a fusion is adding a file."""

from __future__ import annotations

import importlib
import pkgutil

from ..matching import Pattern


def _collect() -> tuple[Pattern, ...]:
    patterns: list[Pattern] = []
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        patterns += getattr(module, "PATTERNS", ())
    return tuple(patterns)


REGISTRY: tuple[Pattern, ...] = _collect()
