"""What one call allocates: at its peak, and what is still there when its result is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .thread_profiler import events_of


class Allocation(NamedTuple):
    """Bytes beyond those that were allocated before a call: ``peak`` the most during it, its result included, ``kept``
    those that are left afterwards, without its result."""

    peak: int
    kept: int


def allocation(call: Callable[[], Any], device: torch.device) -> Allocation | None:
    """What one ``call`` allocates on ``device`` through PyTorch; what libraries allocate by themselves is not seen.

    On CUDA these are the numbers of ``torch.cuda.memory_allocated``, whose peak this resets, with what other threads
    allocate meanwhile; on the CPU what PyTorch's allocator reports to a profiler of this thread, to which memory from
    before that is given back does not count. None on other devices, and where this thread is being profiled already.
    """
    if device.type == "cuda":
        return _on_cuda(call, device)
    return _on_cpu(call) if device.type == "cpu" else None


def _on_cuda(call: Callable[[], Any], device: torch.device) -> Allocation:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return Allocation(
        torch.cuda.max_memory_allocated(device) - before,
        torch.cuda.memory_allocated(device) - before,
    )


def _on_cpu(call: Callable[[], Any]) -> Allocation | None:
    events = events_of(call, memory=True)
    if events is None:
        return None
    peak = total = 0
    for event in (event for event in events if event.kind() == "memory_alloc"):
        total += event.cpu_memory_usage()
        peak = max(peak, total)
    return Allocation(peak, total)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory in which ``tensors`` lie; what several of them share counts once, and those that have yet to get
    their shape not at all."""
    spans = set()
    others = 0
    for tensor in tensors:
        if is_lazy(tensor):
            continue
        try:
            storage = tensor.untyped_storage()
            spans.add((str(storage.device), storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        except (RuntimeError, NotImplementedError):  # sparse and wrapped tensors have no storage of their own
            others += tensor.numel() * tensor.element_size()
    total, place, end = others, "", 0
    for device, start, stop in sorted(spans):
        end = end if device == place else 0
        total += max(0, stop - max(start, end))
        place, end = device, max(end, stop)
    return total
