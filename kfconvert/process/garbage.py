"""Collections of garbage during and after a conversion, kept from looking through all that was there before."""

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
    """Within the block, the collector looks at objects made in it only: those of the libraries that are loaded take it
    a third of a second each time. Somebody else's frozen objects are left alone, those that another thread freezes
    meanwhile as well.

    At the end garbage is collected once: traced graphs are cycles, and refer to the weights. What PyTorch keeps of them
    is forgotten before: sizes in caches of a class, and the sources of generated code that is gone.
    """
    # To count frozen objects takes as long as to look at each; where there are none, no time.
    freezes = not gc.get_freeze_count()
    sources, mark = frozenset(_sources), None
    try:
        if freezes:
            gc.freeze()
        mark = list[Any]()  # which is frozen only if somebody freezes objects from now on
        yield
    finally:
        for method in vars(ShapeEnv).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()
        gc.collect()
        # A list of all objects in this frame, which an exception holds, would hold that exception.
        if freezes and (mark is None or any(each is mark for each in gc.get_objects())):
            gc.unfreeze()
        _note_functions(_sources.keys() - sources, gc.get_objects())
        _forget_sources()


_sources = graph_module._loader.eval_cache
# The names of those that came during a conversion, with the functions that were made of them.
_ours: dict[str, list[weakref.ref[FunctionType]]] = {}


def _note_functions(names: Iterable[str], objects: Iterable[Any]) -> None:
    found: dict[str, list[weakref.ref[FunctionType]]] = {name: [] for name in names}
    for each in objects:
        if type(each) is FunctionType and (known := found.get(each.__code__.co_filename)) is not None:
            known.append(weakref.ref(each))
    _ours.update(found)


def _forget_sources() -> None:
    """Forget the sources that came during conversions and of which no function is left."""
    for name in [name for name, functions in _ours.items() if all(each() is None for each in functions)]:
        del _ours[name]
        _sources.pop(name, None)
        linecache.cache.pop(name, None)
