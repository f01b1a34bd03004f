"""Memory that a call allocates: at its peak, and after its result is freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


class Allocation(NamedTuple):
    """Bytes that a call allocates in addition to the memory before it. ``peak``: the maximum during the call, including
    the result. ``kept``: bytes still allocated after the result is freed."""

    peak: int
    kept: int


def allocation(call: Callable[[], Any], device: torch.device) -> Allocation | None:
    """Measures the allocations of a ``call`` on ``device`` through PyTorch, without other allocators of libraries.

    On CUDA, the values are from ``torch.cuda.memory_allocated``, include other threads, and reset its peak. On the
    CPU, they are from a profiler of this thread, which does not count freed memory from before the call. Returns None
    on other devices, or if this thread is already profiled.
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
    return Allocation(torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before)


def _on_cpu(call: Callable[[], Any]) -> Allocation | None:
    """Uses PyTorch's legacy profiler, which is local to a thread and prints nothing."""
    autograd: Any = torch.autograd
    experimental: Any = torch._C._profiler
    shapes = stacks = flops = modules = False
    settings = shapes, True, stacks, flops, modules  # with memory
    try:
        autograd._enable_profiler_legacy(
            autograd.ProfilerConfig(autograd.ProfilerState.CPU, *settings, experimental._ExperimentalConfig())
        )
    except RuntimeError:  # another profiler runs
        return None
    try:
        call()
    finally:
        threads = autograd._disable_profiler_legacy()
    peak = total = 0
    for event in (event for events in threads for event in events if event.kind() == "memory_alloc"):
        total += event.cpu_memory_usage()
        peak = max(peak, total)
    return Allocation(peak, total)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the storages of ``tensors``. Shared storages count once, and uninitialized parameters count
    as 0."""
    spans = set()
    others = 0
    for tensor in tensors:
        if is_lazy(tensor):
            continue
        try:
            storage = tensor.untyped_storage()
            spans.add((str(storage.device), storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        except (RuntimeError, NotImplementedError):  # sparse and wrapped tensors have no storage
            others += tensor.numel() * tensor.element_size()
    total, place, end = others, "", 0
    for device, start, stop in sorted(spans):
        end = end if device == place else 0
        total += max(0, stop - max(start, end))
        place, end = device, max(end, stop)
    return total
