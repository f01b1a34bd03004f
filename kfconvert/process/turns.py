"""Conversions of one process take turns, with one another and with compilations; what is about one thread only."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.convert_frame import compile_lock


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Within the block, no other thread converts, validates or compiles a model; a thread may enter it again.

    A trace replaces what belongs to the whole process (flags of PyTorch, methods of ``nn.Module``, builtins, the
    libraries that are switched on), dispatch modes and ``fork_rng`` put back what they found, and sites are timed: two
    conversions at once would restore what the other had put there, and measure one another. As ``torch.compile`` sets
    the same flags in the same way, the lock is that of its compilations. Calls of models never wait for it.
    """
    with compile_lock:
        yield


# A process that was forked while another thread converts would have what that has replaced, and its lock, for good. So
# a fork waits for its turn, but not for ever: the one that converts may wait for the one that forks.
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
    """True in the thread that made it, until it is ``over``; false in all others."""

    def __init__(self):
        self._thread, self.over = threading.get_ident(), False

    def __bool__(self) -> bool:
        return not self.over and threading.get_ident() == self._thread
