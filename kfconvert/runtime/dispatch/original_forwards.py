"""A switch that makes converted models run their original forwards in one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Originals(threading.local):
    wanted = 0


_originals = _Originals()


def originals_wanted() -> bool:
    """Whether this thread is within ``originals()``."""
    return _originals.wanted > 0


@contextmanager
def originals() -> Iterator[None]:
    """Context manager that makes converted models run their original forwards in this thread, uncounted."""
    _originals.wanted += 1
    try:
        yield
    finally:
        _originals.wanted -= 1
