"""Streams on which calls are recorded, and the workspaces that cuBLAS and cuBLASLt keep for them."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from .driver_graph import new_stream, prepare_thread

# Any product asks for a workspace.
_SIZE = 16


class CaptureStream:
    """A stream for the captures of one pool, on which nothing runs.

    cuBLAS and cuBLASLt keep a workspace for each stream, to which products that were recorded on it write when they are
    replayed: on one of PyTorch's 32 streams, somebody else's products could be using it meanwhile. Who clears the
    workspaces, as ``torch.compile`` does, gives their memory away. So those of this stream lie in memory from which
    nobody else gets any, and which stays as long as the process does.
    """

    def __init__(self, device: torch.device):
        with torch.cuda.device(device):
            # PyTorch makes a context when it needs one, which may be now, and for each thread.
            prepare_thread(torch.cuda.current_device())
            self.stream = torch.cuda.ExternalStream(new_stream(), device=device)
        self._memory = torch.cuda.graph_pool_handle()
        self._factor, self._product = (torch.zeros(_SIZE, _SIZE, device=device) for _ in range(2))
        self._bias = torch.zeros(_SIZE, device=device)

    def prepare(self) -> None:
        """To be called by a thread before it captures: let there be the workspaces, which would else be made within the
        capture, where the memory of the recordings is. The stream must be the current one."""
        index: int = self.stream.device.index
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, self._memory)
        try:
            torch.mm(self._factor, self._factor, out=self._product)
            torch.addmm(self._bias, self._factor, self._factor, out=self._product)  # by cuBLASLt
        finally:
            torch._C._cuda_endAllocateToPool(index, self._memory)


# Those whose owners are gone, by device.
_unused: dict[torch.device, list[CaptureStream]] = {}
_lock = threading.Lock()


def capture_stream(owner: Any, device: torch.device) -> CaptureStream:
    """One on ``device`` that nobody else has for as long as ``owner`` lives."""
    with _lock:
        known = _unused.setdefault(device, [])
        found = known.pop() if known else None
    if found is None:
        found = CaptureStream(device)
    else:
        torch.cuda.synchronize(device)  # the last replays of the owner before may be running still
    weakref.finalize(owner, known.append, found).atexit = False
    return found
