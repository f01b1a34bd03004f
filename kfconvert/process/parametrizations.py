"""Disables the cache of parametrized weights during a conversion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.utils import parametrize


@contextmanager
def parametrizations_computed() -> Iterator[None]:
    """Context manager in which an outer ``torch.nn.utils.parametrize.cached()`` has no effect, because a trace would
    treat cached values as constants. The cache is restored afterwards.

    The switch is process-wide, so other threads within ``cached()`` may recompute such weights meanwhile. Their changes
    of the nesting count are kept.
    """
    blocks, kept = parametrize._cache_enabled, parametrize._cache
    if not blocks:
        yield
        return
    # Only differences, because other threads may change the count.
    parametrize._cache_enabled -= blocks
    parametrize._cache = {}
    try:
        yield
    finally:
        parametrize._cache_enabled += blocks
        parametrize._cache = kept if parametrize._cache_enabled else {}
