"""Garbage collection during and after a conversion, without objects that existed before."""

from __future__ import annotations

import gc
import linecache
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch.fx import graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Context manager in which the garbage collector only traverses new objects, because objects of loaded libraries
    take 0.3 s per collection. Objects frozen by others, also by other threads meanwhile, are not changed.

    At the end, garbage is collected once, because traced graphs are cycles that refer to weights. Before, PyTorch's
    references to them are dropped: sizes in class caches, and sources of unused generated code.
    """
    # Counting frozen objects takes as long as traversing them, but no time if there are none.
    freezes = not gc.get_freeze_count()
    sources, mark = frozenset(_sources), None
    try:
        if freezes:
            gc.freeze()
        mark = list[Any]()  # frozen only if someone freezes objects later
        yield
    finally:
        for method in vars(ShapeEnv).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()
        gc.collect()
        # A list of all objects in this frame would create a cycle with an exception that references the frame.
        if freezes and (mark is None or any(each is mark for each in gc.get_objects())):
            gc.unfreeze()
        _note_functions(_sources.keys() - sources, gc.get_objects())
        _forget_sources()


_sources = graph_module._loader.eval_cache
# The names of sources from conversions, with the functions created from them.
_ours: dict[str, list[weakref.ref[FunctionType]]] = {}


def _note_functions(names: Iterable[str], objects: Iterable[Any]) -> None:
    found: dict[str, list[weakref.ref[FunctionType]]] = {name: [] for name in names}
    for each in objects:
        if type(each) is FunctionType and (known := found.get(each.__code__.co_filename)) is not None:
            known.append(weakref.ref(each))
    _ours.update(found)


def _forget_sources() -> None:
    """Drops the sources from conversions whose functions no longer exist."""
    for name in [name for name, functions in _ours.items() if all(each() is None for each in functions)]:
        del _ours[name]
        _sources.pop(name, None)
        linecache.cache.pop(name, None)
