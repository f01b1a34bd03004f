"""Streams for CUDA graph capture, with their cuBLAS and cuBLASLt workspaces."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .driver_graph import new_stream, prepare_thread

# Any matrix product requests a workspace.
_SIZE = 16


class CaptureStream:
    """A stream for the captures of one pool, on which nothing runs.

    cuBLAS and cuBLASLt keep one workspace for each stream, and a recorded product writes to it at each replay. On one
    of PyTorch's 32 shared streams, other products could use that workspace at the same time. Code that clears the
    workspaces, as ``torch.compile`` does, releases their memory. This stream therefore takes its workspaces from
    memory that nothing else uses and that stays until the process ends.
    """

    def __init__(self, device: torch.device):
        with torch.cuda.device(device):
            # PyTorch creates the context lazily for each thread.
            prepare_thread(torch.cuda.current_device())
            self.stream = torch.cuda.ExternalStream(new_stream(), device=device)
        self._memory = torch.cuda.graph_pool_handle()
        self._factor, self._product = (torch.zeros(_SIZE, _SIZE, device=device) for _ in range(2))
        self._bias = torch.zeros(_SIZE, device=device)

    def prepare(self) -> None:
        """Create the workspaces. A thread calls this before it captures, with this stream current: otherwise the
        capture would create them in the memory of the recordings."""
        index: int = self.stream.device.index
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, self._memory)
        try:
            torch.mm(self._factor, self._factor, out=self._product)
            torch.addmm(self._bias, self._factor, self._factor, out=self._product)  # by cuBLASLt
        finally:
            torch._C._cuda_endAllocateToPool(index, self._memory)


# One capture at a time in a process.
_capturing = threading.RLock()


@contextmanager
def one_capture() -> Iterator[None]:
    """Context manager for a capture: without garbage collection, as freeing another graph would end the capture."""
    with _capturing:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


# Streams without an owner, by device.
_unused: dict[torch.device, list[CaptureStream]] = {}
_lock = threading.Lock()


def capture_stream(owner: Any, device: torch.device) -> CaptureStream:
    """Return a stream on ``device`` that is reserved for as long as ``owner`` lives."""
    with _lock:
        known = _unused.setdefault(device, [])
        found = known.pop() if known else None
    if found is None:
        found = CaptureStream(device)
    else:
        torch.cuda.synchronize(device)  # the previous owner's last replays may still run
    weakref.finalize(owner, known.append, found).atexit = False
    return found
