"""Suppresses logs and warnings of one thread."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from .turns import ThisThread


@contextmanager
def quiet_thread() -> Iterator[None]:
    """Context manager that drops the logs of this thread, and warnings."""
    here, handlers = ThisThread(), _handlers()

    def is_emitted(record: logging.LogRecord) -> bool:
        return not here

    for handler in handlers:
        handler.addFilter(is_emitted)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_emitted)


def _handlers() -> list[logging.Handler]:
    known = [logging.root, *list(logging.root.manager.loggerDict.values())]
    loggers = [logger for logger in known if isinstance(logger, logging.Logger)]  # others are placeholders
    found = [handler for logger in loggers for handler in list(logger.handlers)]
    if logging.lastResort is not None:  # the handler of loggers without handlers
        found.append(logging.lastResort)
    return list(dict.fromkeys(found))
