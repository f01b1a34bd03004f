"""Suppresses logs and warnings of one thread without affecting other threads."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .turns import ThisThread


@contextmanager
def quiet_thread() -> Iterator[None]:
    """Context manager that drops logs and warnings of this thread.

    ``logging.disable`` and ``warnings.catch_warnings`` are process-wide, and overwrite changes that others make
    meanwhile. This context only adds filters and removes them again.
    """
    with _unlogged(), _unwarned():
        yield


class _OfThread(ThisThread):
    def match(self, text: str) -> bool:
        """Implements the message pattern of a warnings filter."""
        return bool(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Implements a filter of log handlers, in the logging thread: whether to emit ``record``."""
        return not self


@contextmanager
def _unlogged() -> Iterator[None]:
    own, handlers = _OfThread(), _handlers()
    for handler in handlers:
        handler.addFilter(own)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(own)


def _handlers() -> list[logging.Handler]:
    known = [logging.root, *list(logging.root.manager.loggerDict.values())]
    loggers = [logger for logger in known if isinstance(logger, logging.Logger)]  # others are placeholders
    found = [handler for logger in loggers for handler in list(logger.handlers)]
    if logging.lastResort is not None:  # the handler of loggers without handlers
        found.append(logging.lastResort)
    return list(dict.fromkeys(found))


@contextmanager
def _unwarned() -> Iterator[None]:
    own = _OfThread()
    filters: Any = warnings.filters  # a list, annotated as a sequence
    entry = ("ignore", own, Warning, None, 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        own.over = True
        # Threads that are within catch_warnings have a copy of the list, and threads that leave it restore an old list.
        lists: list[Any] = [filters, warnings.filters]
        for known in lists:
            while entry in known:
                known.remove(entry)
