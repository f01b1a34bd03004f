"""What PyTorch's allocator and dispatcher report of one call, on the thread that makes it."""

from collections.abc import Callable
from typing import Any

import torch


def events_of(call: Callable[[], Any], memory: bool) -> list[Any] | None:
    """The events of one ``call`` in their order, with those of ``memory`` or without; None where this thread is being
    profiled already.

    The profiler is torch's older one, which unlike its successor belongs to one thread and prints nothing.
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
    except RuntimeError:  # another one runs
        return None
    try:
        call()
    finally:
        threads = autograd._disable_profiler_legacy()
    return [event for events in threads for event in events]
