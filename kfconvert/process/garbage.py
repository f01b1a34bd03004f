"""Collections of garbage during and after a conversion, kept from looking through all that was there before."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Within the block, the collector looks at objects made in it only: those of the libraries that are loaded take it
    a third of a second each time. Somebody else's frozen objects are left alone, those that another thread freezes
    meanwhile as well.

    At the end garbage is collected once: traced graphs are cycles, and refer to the weights.
    """
    theirs, count = gc.get_freeze_count(), sys.maxsize
    try:
        if not theirs:
            gc.freeze()
        count = gc.get_freeze_count()
        yield
    finally:
        gc.collect()
        if not theirs and gc.get_freeze_count() <= count:
            gc.unfreeze()
