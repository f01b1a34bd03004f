"""Events of PyTorch's allocator and dispatcher during a call, on the calling thread."""

from collections.abc import Callable
from typing import Any

import torch


def events_of(call: Callable[[], Any], memory: bool) -> list[Any] | None:
    """Returns the events of a ``call`` in order, optionally with ``memory`` events; None if this thread is already
    profiled.

    This is PyTorch's legacy profiler, which is local to a thread and prints nothing.
    """
    autograd: Any = torch.autograd
    options: Any = torch._C._profiler
    config = autograd.ProfilerConfig(
        autograd.ProfilerState.CPU,
        False,  # shapes
        memory,
        False,  # stacks
        False,  # floating-point operations
        False,  # modules
        options._ExperimentalConfig(),
    )
    try:
        autograd._enable_profiler_legacy(config)
    except RuntimeError:  # another profiler runs
        return None
    try:
        call()
    finally:
        threads = autograd._disable_profiler_legacy()
    return [event for events in threads for event in events]
