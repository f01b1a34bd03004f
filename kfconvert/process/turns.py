"""The lock that serializes conversions and compilations of a process, and a thread-specific flag."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.convert_frame import compile_lock


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Context manager in which no other thread converts, validates or compiles a model. It is reentrant.

    A trace replaces process-wide state (see ``patches``), and sites are timed. ``torch.compile`` replaces the same
    state, so this is the lock of its compilations. Calls of models never wait for it.
    """
    with compile_lock:
        yield


class ThisThread:
    """An object that is True in the thread that created it, until it is ``over``, and False in other threads."""

    def __init__(self):
        self._thread, self.over = threading.get_ident(), False

    def __bool__(self) -> bool:
        return not self.over and threading.get_ident() == self._thread
