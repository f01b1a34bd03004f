"""stdout is for results alone: what libraries, C code and child processes write there goes to stderr."""

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
    """The stream for results. Where it fails nothing is raised: ``error`` keeps the first failure, so that work that
    was begun is ended, and what follows is dropped. ``has_begun``: whether anything was written."""

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
        if isinstance(text, bytes):  # as click writes what a shell asks it for
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
    """Yields the stream for results, which is ``sys.stdout`` within the block.

    Where that is the process's own, descriptor 1 leads to stderr meanwhile: a library that prints from C, or a child
    process, does not get between the results.
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
        _flush_c()  # what C code has in its buffers belongs to the time of the block
        os.dup2(saved, 1)
        with contextlib.suppress(OSError):  # told by then: the results had been flushed
            stream.close()
        os.close(saved)


def quiet_end() -> None:
    """Keeps the interpreter from failing when it flushes a stderr that takes nothing."""
    try:
        sys.stderr.flush()
    except OSError:
        sys.stderr = open(os.devnull, "w")


def _fill_descriptors() -> None:
    """Opens the standard descriptors that are closed, which else the next files would get, and stderr on them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")


def _is_descriptor_1(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.fileno() == 1
    except (OSError, ValueError):  # a test's, or a program's that calls the command
        return False


def _flush_c() -> None:
    ctypes.CDLL(None).fflush(None)
