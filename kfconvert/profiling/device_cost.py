"""What one call costs a CUDA device besides time: kernel launches and memory."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .allocations import allocation

# Seconds to wait in a profiler session before its first kernel, one attempt after the other: the profiler
# drops kernels whose time, on a device clock that has drifted, lies before the session
# (pytorch/pytorch#192021).
PAUSES_S = (0.0, 0.01, 0.1)
# Device events that are no kernels; the profiler tells them by name only.
_TRANSFERS = ("Memcpy", "Memset")


def count_launches(call: Callable[[], Any], device: torch.device) -> int | None:
    """Kernels that `call` starts, on whatever stream or GPU; copies and fills by the driver are none.

    None off CUDA, and where the profiler does not see every kernel (another tool is using the GPU's
    counters). Each attempt calls once.
    """
    if device.type != "cuda":
        return None
    for pause_s in PAUSES_S:
        names = _kernels(call, device, pause_s)
        # The fences are the first and the last; the first is missing where the profiler dropped something.
        if len(names) >= 2 and names[0] == names[-1]:
            return len(names) - 2
    return None


def peak_memory(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes that one call has allocated at its peak beyond what was allocated before; None off CUDA.

    They are those of `torch.cuda.max_memory_allocated`, whose peak this resets.
    """
    if device.type != "cuda":
        return None
    allocated = allocation(call, device)
    return None if allocated is None else allocated.peak


def _kernels(call: Callable[[], Any], device: torch.device, pause_s: float) -> list[str]:
    """Names of the kernels as they started: a small one as a fence, those of `call`, and the fence again."""
    fence = torch.zeros(1, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as session:
        time.sleep(pause_s)
        fence.add_(1)
        torch.cuda.synchronize(device)
        call()
        torch.cuda.synchronize(device)
        fence.add_(1)
        torch.cuda.synchronize(device)
    kernels = [
        event
        for event in session.events()
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(_TRANSFERS)
    ]
    return [event.name for event in sorted(kernels, key=lambda event: event.time_range.start)]
