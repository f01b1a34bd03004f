"""Limits the processor time of traces: one trace by a ``Deadline``, all traces of a conversion by a ``Budget``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

# Code that cleans up after the error gets so many seconds before the next one, as it may have to restore state.
GRACE_SECONDS = 1.0


class Budget:
    """Seconds of processor time of this thread, counted from construction; may be infinite."""

    def __init__(self, seconds: float = math.inf):
        self.seconds = seconds
        self._end = time.thread_time() + seconds

    def left(self) -> float:
        """The remaining seconds; negative once the budget is spent."""
        return self._end - time.thread_time()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager whose processor time does not count."""
        before = time.thread_time()
        try:
            yield
        finally:
            self._end += time.thread_time() - before


class Deadline(TorchFunctionMode):
    """Context manager under which the first tensor operation that begins after ``seconds`` raises a TimeoutError.

    The seconds are processor time of this thread, so that the load of the machine has little influence.

    Calls that only set something never raise it, such as the call by which `torch.no_grad` enables gradients again.
    """

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self._end = seconds, time.thread_time() + seconds

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        now = time.thread_time()
        if now > self._end and any(isinstance(arg, Tensor) for arg in args) and func.__name__ != "__set__":
            self._end = now + GRACE_SECONDS
            raise TimeoutError(f"took longer than {self.seconds:.1f} s")
        return func(*args, **(kwargs or {}))
