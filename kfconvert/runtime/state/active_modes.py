"""What of a thread decides how its calls run: modes that look on, and the default device."""

from __future__ import annotations

import torch
from torch.utils._device import DeviceContext

_CPU = torch.device("cpu")


def default_device() -> torch.device:
    """``torch.get_default_device()``, faster where nobody has set one."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU


def function_mode() -> str | None:
    """The class of a TorchFunctionMode of this thread, which may do anything in the place of functions; None without
    one."""
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        # torch.set_default_device is a mode too, and decides about new tensors only.
        if type(mode) is not DeviceContext:
            return type(mode).__name__
    return None


def onlooker() -> str | None:
    """Why a program must not run under a mode of this thread, which would not see the original's operators; None
    without one."""
    mode = function_mode() if torch._C._len_torch_function_stack() else None
    if mode is not None:
        return f"the active {mode} would not see the fused calls"
    if torch._C._len_torch_dispatch_stack():
        return "the active TorchDispatchMode would not see the fused calls"
    return None
