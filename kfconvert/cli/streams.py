"""Reserves stdout for results: output of libraries, C code and child processes goes to stderr."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO


class Results:
    """The stream for results. A failed write does not raise: ``error`` stores the first failure, and later writes are
    dropped. ``has_begun``: whether anything was written."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.error: OSError | None = None
        self.has_begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self.has_begun |= bool(text)
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, function: Callable[..., Any], *args: str) -> None:
        if self.error is None:
            try:
                function(*args)
            except OSError as error:
                self.error = error


@contextlib.contextmanager
def results() -> Iterator[Results]:
    """Context manager that yields the stream for results and sets ``sys.stdout`` to it.

    If ``sys.stdout`` is the process's stdout, descriptor 1 is redirected to stderr, also for C libraries and child
    processes.
    """
    stdout = sys.stdout or open(os.devnull, "w")
    with contextlib.ExitStack() as stack:
        found: Any = Results(stack.enter_context(_own_descriptor(stdout)) if _is_descriptor_1(stdout) else stdout)
        stack.enter_context(contextlib.redirect_stdout(found))
        try:
            yield found
        finally:
            found.flush()


@contextlib.contextmanager
def _own_descriptor(stdout: TextIO) -> Iterator[TextIO]:
    stdout.flush()
    saved = os.dup(1)
    stream = open(saved, "w", encoding=stdout.encoding, errors="backslashreplace", closefd=False)
    os.dup2(2, 1)
    try:
        yield stream
    finally:
        ctypes.CDLL(None).fflush(None)  # C buffers were filled within the block
        os.dup2(saved, 1)
        with contextlib.suppress(OSError):  # already reported, because results are flushed before
            stream.close()
        os.close(saved)


def _is_descriptor_1(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, ValueError):  # a stream without a descriptor, such as a test's
        return False
