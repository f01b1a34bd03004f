"""Kernel launches of a call on a CUDA device."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Seconds to wait in a profiler session before its first kernel, per attempt. If the device clock has drifted, the
# profiler drops kernels that seem to start before the session (pytorch/pytorch#192021).
PAUSES_S = (0.0, 0.01, 0.1)
# Names of device events that are not kernels.
_TRANSFERS = ("Memcpy", "Memset")


def count_launches(call: Callable[[], Any], device: torch.device) -> int | None:
    """Returns the number of kernels that `call` launches on all streams and GPUs, without copies and fills.

    Returns None on other devices than CUDA, or if the profiler misses kernels (another tool uses the GPU's counters).
    Each attempt calls once.
    """
    if device.type != "cuda":
        return None
    for pause_s in PAUSES_S:
        names = _kernels(call, device, pause_s)
        # Fences are the first and the last kernel. If the first is missing, the profiler dropped kernels.
        if len(names) >= 2 and names[0] == names[-1]:
            return len(names) - 2
    return None


def _kernels(call: Callable[[], Any], device: torch.device, pause_s: float) -> list[str]:
    """The names of the launched kernels, in order: a small kernel as a fence, those of `call`, and the fence again."""
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
