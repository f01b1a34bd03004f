"""Ends Python code that calls operators of PyTorch when it takes too long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


class Deadline(TorchFunctionMode):
    """Within the block, the first function of PyTorch that is called after ``seconds`` raises a TimeoutError."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self._end = seconds, time.perf_counter() + seconds

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.perf_counter() > self._end:
            raise TimeoutError(f"took longer than {self.seconds:.1f} s")
        return func(*args, **(kwargs or {}))
