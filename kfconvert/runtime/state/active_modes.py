"""The modes and the default device of a thread, which affect its calls."""

from __future__ import annotations

import torch
from torch.utils._device import DeviceContext

_CPU = torch.device("cpu")


def default_device() -> torch.device:
    """``torch.get_default_device()``, faster where nobody has set one."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU


def function_mode() -> str | None:
    """The class name of an active TorchFunctionMode of this thread, which may replace any function, or None."""
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        # torch.set_default_device is also a mode, and only affects new tensors.
        if type(mode) is not DeviceContext:
            return type(mode).__name__
    return None


def onlooker() -> str | None:
    """The reason why a program must not run under a mode of this thread, which would miss the original's operators;
    None without one."""
    mode = function_mode() if torch._C._len_torch_function_stack() else None
    if mode is not None:
        return f"the active {mode} would not see the fused calls"
    if torch._C._len_torch_dispatch_stack():
        return "the active TorchDispatchMode would not see the fused calls"
    return None
