"""Parametrized weights are computed in each use while a model is converted, whatever the code around keeps of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.utils import parametrize


@contextmanager
def parametrizations_computed() -> Iterator[None]:
    """Within the block, ``torch.nn.utils.parametrize.cached()`` around it has no effect, and what was computed within
    it before is not found: a trace would take that for constants. It is there again after the block.

    The switch is one of the whole process: other threads that are within ``cached()`` may compute such weights anew
    meanwhile. What they add to the count of its blocks, and take away from it, stays.
    """
    blocks, kept = parametrize._cache_enabled, parametrize._cache
    if not blocks:
        yield
        return
    # Differences only, as others may count at the same time.
    parametrize._cache_enabled -= blocks
    parametrize._cache = {}
    try:
        yield
    finally:
        parametrize._cache_enabled += blocks
        parametrize._cache = kept if parametrize._cache_enabled else {}
