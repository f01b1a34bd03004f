"""The lock that serialises conversions and compilations of a process, and thread-specific flags."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.convert_frame import compile_lock


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Context manager in which no other thread converts, validates or compiles a model. It is reentrant.

    A trace replaces process-wide state (flags of PyTorch, methods of ``nn.Module``, builtins, enabled libraries),
    dispatch modes and ``fork_rng`` restore earlier state, and sites are timed. Concurrent conversions would restore
    each other's replacements and distort timings. ``torch.compile`` sets the same flags, so this is the lock of its
    compilations. Calls of models never wait for it.
    """
    with compile_lock:
        yield


# A process forked during a conversion would keep the replacements and the lock forever. So a fork waits for the lock,
# with a timeout, because the converting thread may wait for the forking thread.
_FORKS_AFTER_S = 60.0
_own = threading.local()


def _before_fork() -> None:
    _own.turn = compile_lock.acquire(timeout=_FORKS_AFTER_S)


def _after_fork() -> None:
    if _own.turn:
        compile_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


class ThisThread:
    """An object that is True in the thread that created it, until it is ``over``, and False in other threads."""

    def __init__(self):
        self._thread, self.over = threading.get_ident(), False

    def __bool__(self) -> bool:
        return not self.over and threading.get_ident() == self._thread
