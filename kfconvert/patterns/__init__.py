"""The registry of fusions: every ``PATTERNS`` tuple of the files in this package. To add a fusion, add a file.

The registry also has the user's patterns (see ``own_patterns``). They take precedence if both match equally well.
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
    """Returns all patterns: the user's, in order of registration, then the package's."""
    return (*_own.values(), *REGISTRY) if _own else REGISTRY


def search(graph: fx.Graph, refusal: Callable[[Match], str | None] = lambda match: None) -> Findings:
    """Returns the findings in ``graph``, see ``matching.find``, with the unmatched activations."""
    findings = find(graph, every_pattern(), refusal)
    findings.activations = unmatched_activations(graph, findings)
    return findings


def add(pattern: Pattern) -> None:
    """Registers ``pattern``, a user's pattern. Its name must be unused."""
    _own[pattern.name] = pattern


def remove(name: str) -> bool:
    """Unregisters a user's pattern. Returns False if there is none with this name."""
    return _own.pop(name, None) is not None


@contextmanager
def only_own(patterns: Iterable[Pattern]) -> Iterator[None]:
    """Context manager that replaces the user's patterns with ``patterns``."""
    global _own
    before, _own = _own, {pattern.name: pattern for pattern in patterns}
    try:
        yield
    finally:
        _own = before
