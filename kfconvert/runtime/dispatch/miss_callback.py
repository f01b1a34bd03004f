"""The user's callback for misses."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

# Receives the reason of a miss, as ``kfconvert_info()`` counts it.
OnMiss = Callable[[str], Any]


class MissCallback:
    """Calls ``function`` for each miss of a model named ``model_name``; does nothing where it is None.

    An exception in it causes one warning, and the call that missed continues. While it runs, misses of its thread are
    not reported, as it may call the model. Copies of the model use the same function; pickles drop it, as most
    functions cannot be pickled.
    """

    def __init__(self, function: OnMiss | None, model_name: str):
        self._function, self._model_name = function, model_name
        self._warned = False
        self._running = threading.local()

    @property
    def is_wanted(self) -> bool:
        """Whether there is a function to call."""
        return self._function is not None

    def __call__(self, reason: str, stacklevel: int) -> None:
        if self._function is None or getattr(self._running, "now", False):
            return
        self._running.now = True
        try:
            self._function(reason)
        except Exception as error:
            self._warn(error, stacklevel + 1)
        finally:
            self._running.now = False

    def _warn(self, error: Exception, stacklevel: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"kfconvert: on_miss of {self._model_name} raised {type(error).__name__}: {error}. "
                "The call continued; further errors are not reported.",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> MissCallback:
        return MissCallback(self._function, self._model_name)

    def __reduce__(self) -> tuple[Any, ...]:
        return MissCallback, (None, self._model_name)
