"""Reserves stdout for results: output of libraries, C code and child processes goes to stderr."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO


class Results(io.TextIOBase):
    """The stream for results. A failed write does not raise: ``error`` stores the first failure, and later writes are
    dropped. ``has_begun``: whether anything was written."""

    def __init__(self, stream: TextIO | None):
        self._stream = stream
        self.error = OSError(errno.EBADF, "it is closed") if stream is None else None
        self.has_begun = False

    @property
    def encoding(self) -> str:  # type: ignore[override]  # io.TextIOBase has a property there, too
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str | bytes) -> int:
        if isinstance(text, bytes):  # click writes completions as bytes
            text = text.decode()
        self.has_begun |= bool(text)
        if self._stream is not None and self.error is None:
            try:
                self._stream.write(text)
            except OSError as error:
                self.error = error
        return len(text)

    def flush(self) -> None:
        if self._stream is not None and self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self.error = error


@contextlib.contextmanager
def results() -> Iterator[Results]:
    """Context manager that yields the stream for results and sets ``sys.stdout`` to it.

    If ``sys.stdout`` is the process's stdout, descriptor 1 is redirected to stderr, also for C libraries and child
    processes.
    """
    _fill_descriptors()
    stdout = sys.stdout
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(_own_descriptor(stdout)) if _is_descriptor_1(stdout) else stdout
        found = Results(stream)
        stack.enter_context(contextlib.redirect_stdout(found))
        try:
            yield found
        finally:
            found.flush()


@contextlib.contextmanager
def _own_descriptor(stdout: TextIO) -> Iterator[TextIO]:
    stdout.flush()
    _flush_c()
    saved = os.dup(1)
    stream = open(saved, "w", encoding=stdout.encoding, errors="backslashreplace", closefd=False)
    os.dup2(2, 1)
    try:
        yield stream
    finally:
        _flush_c()  # C buffers were filled within the block
        os.dup2(saved, 1)
        with contextlib.suppress(OSError):  # already reported, because results are flushed before
            stream.close()
        os.close(saved)


def quiet_end() -> None:
    """Prevents an error at exit when stderr cannot be flushed."""
    try:
        sys.stderr.flush()
    except OSError:
        sys.stderr = open(os.devnull, "w")


def _fill_descriptors() -> None:
    """Opens closed standard descriptors on the null device, so that new files do not get their numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")


def _is_descriptor_1(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.fileno() == 1
    except (OSError, ValueError):  # a stream without a descriptor, such as a test's
        return False


def _flush_c() -> None:
    ctypes.CDLL(None).fflush(None)
