"""Frees the graphs of a conversion, and of a load."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextmanager
def garbage_collected_once() -> Iterator[None]:
    """As ``garbage_collected``, with one collection, at the end, of objects made within. Each search of all objects of
    a process takes about 0.5 s, and the graphs of a load cause several; they refer to no data besides the weights."""
    collecting, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    if not frozen:
        gc.freeze()
    try:
        with garbage_collected():
            yield
    finally:
        if not frozen:  # else the caller has frozen objects
            gc.unfreeze()
        if collecting:
            gc.enable()


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
