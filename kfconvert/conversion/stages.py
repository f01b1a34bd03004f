"""The stages of a conversion: their progress and duration."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOG = logging.getLogger(__name__)
# Called with (stage, done, total).
Progress = Callable[[str, int, int], None]


class Stages:
    """``seconds`` has the duration of each finished stage, ``spent`` the processor time since construction."""

    def __init__(self, progress: Progress | None = None):
        self._progress = progress or (lambda stage, done, total: None)
        self.seconds: dict[str, float] = {}
        self._begin = time.thread_time()

    def spent(self) -> float:
        return time.thread_time() - self._begin

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """Context manager that runs a stage; it yields a function to call after each of ``total`` units of work."""
        start, done = time.perf_counter(), 0

        def advance() -> None:
            nonlocal done
            done += 1
            self._progress(name, done, total)

        self._progress(name, 0, total)
        yield advance
        self.seconds[name] = time.perf_counter() - start
        _LOG.debug("%s took %.2f s", name, self.seconds[name])
