"""Collections of garbage during and after a conversion, kept from looking through all that was there before."""

from __future__ import annotations

import gc
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType

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
    sources = frozenset(_sources)
    theirs, count = gc.get_freeze_count(), sys.maxsize
    try:
        if not theirs:
            gc.freeze()
        count = gc.get_freeze_count()
        yield
    finally:
        for method in vars(ShapeEnv).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()
        gc.collect()
        if not theirs and gc.get_freeze_count() <= count:
            gc.unfreeze()
        _ours.update(_sources.keys() - sources)
        if not gc.get_freeze_count():
            _forget_sources()


_sources = graph_module._loader.eval_cache
_ours: set[str] = set()  # those that came during a conversion


def _forget_sources() -> None:
    """Forget the sources that came during conversions and whose code is gone."""
    alive = {each.__code__.co_filename for each in gc.get_objects() if type(each) is FunctionType}
    for name in list(_ours - alive):
        _ours.discard(name)
        _sources.pop(name, None)
        linecache.cache.pop(name, None)
