"""Keeps a thread from logging and warning; other threads log and warn as before."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .turns import ThisThread


@contextmanager
def quiet_thread() -> Iterator[None]:
    """Within the block, what this thread logs and warns of is dropped.

    ``logging.disable`` and ``warnings.catch_warnings`` are about the whole process, and put back what they found,
    whatever others have set in between; here something is added, and that alone is taken away again.
    """
    with _unlogged(), _unwarned():
        yield


class _OfThread(ThisThread):
    def match(self, text: str) -> bool:
        """As a filter of warnings asks for it, in place of a pattern for the message."""
        return bool(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """As a handler of logs asks for it, in the thread that logs: whether to emit ``record``."""
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
    loggers = [logger for logger in known if isinstance(logger, logging.Logger)]  # or a place in the tree of names
    found = [handler for logger in loggers for handler in list(logger.handlers)]
    if logging.lastResort is not None:  # which serves where a logger has no handler
        found.append(logging.lastResort)
    return list(dict.fromkeys(found))


@contextmanager
def _unwarned() -> Iterator[None]:
    own = _OfThread()
    filters: Any = warnings.filters  # which is a list, and annotated as a sequence
    entry = ("ignore", own, Warning, None, 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        own.over = True
        # Another thread that is within catch_warnings now has a copy; and one that left it has put back the list that
        # it found.
        lists: list[Any] = [filters, warnings.filters]
        for known in lists:
            while entry in known:
                known.remove(entry)
