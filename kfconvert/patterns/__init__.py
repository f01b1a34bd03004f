"""The registry of fusions: every ``PATTERNS`` tuple of the files in this package. Adding a fusion is adding a file.

Beside them are those that a user has registered (see ``own_patterns``), which come first where both fit as well.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import fx

from ..matching import Findings, Match, Pattern, find
from .unmatched import unmatched_activations


def _collect() -> tuple[Pattern, ...]:
    patterns: list[Pattern] = []
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        patterns += getattr(module, "PATTERNS", ())
    return tuple(patterns)


REGISTRY: tuple[Pattern, ...] = _collect()

_own: dict[str, Pattern] = {}


def every_pattern() -> tuple[Pattern, ...]:
    """Those that are looked for: a user's own, in the order in which they were registered, and the registry."""
    return (*_own.values(), *REGISTRY) if _own else REGISTRY


def search(graph: fx.Graph, refusal: Callable[[Match], str | None] = lambda match: None) -> Findings:
    """What is found in ``graph``, see ``matching.find``, and the activations that are left."""
    findings = find(graph, every_pattern(), refusal)
    findings.activations = unmatched_activations(graph, findings)
    return findings


def add(pattern: Pattern) -> None:
    """Look for ``pattern``, a user's own, from now on. The name must not be taken."""
    _own[pattern.name] = pattern


def remove(name: str) -> bool:
    """Look for a user's own pattern no longer; False where there is none of this name."""
    return _own.pop(name, None) is not None


@contextmanager
def only_own(patterns: Iterable[Pattern]) -> Iterator[None]:
    """Within the block, these are the user's own patterns, and no others."""
    global _own
    before, _own = _own, {pattern.name: pattern for pattern in patterns}
    try:
        yield
    finally:
        _own = before
