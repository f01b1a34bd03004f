"""Frees the graphs of a conversion."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextmanager
def garbage_collected() -> Iterator[None]:
    """Context manager after which garbage is collected: traced graphs are cycles that refer to weights, and PyTorch's
    caches of sizes refer to them."""
    try:
        yield
    finally:
        for method in vars(ShapeEnv).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()
        gc.collect()
