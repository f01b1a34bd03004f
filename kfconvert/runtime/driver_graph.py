"""CUDA graphs by the calls of the driver, with the memory of PyTorch's pools.

``torch.cuda.CUDAGraph`` does more: while it captures, no other thread of the process can draw random numbers on the
device, and a capture that fails leaves the process so. The calls are those of the CUDA driver API, "Graph Management"
and "Stream Management".
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

import torch

# Does not wait for the legacy default stream, nor that for it.
_NON_BLOCKING = 1
# Only calls of the capturing thread that cannot be captured end a capture.
_THREAD_LOCAL = 1


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    driver.cuGraphLaunch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return driver


@cache
def has_driver() -> bool:
    """Whether the driver can be called: not with AMD's GPUs, which PyTorch calls CUDA devices too, nor on Windows."""
    try:
        return torch.version.cuda is not None and bool(_driver())
    except OSError:
        return False


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        _refuse(code)


def _refuse(code: int) -> NoReturn:
    """Raises RuntimeError with the driver's name for what went wrong."""
    found = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(found))
    raise RuntimeError((found.value or b"CUDA error").decode())


class _Ready(threading.local):
    """The devices whose context this thread has used: the driver works on that of the thread, which the first call of
    the runtime in it sets."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_ready = _Ready()


def prepare_thread(device: int) -> None:
    """To be called in a thread, with ``device`` its current one, before it copies and replays there."""
    if device not in _ready.devices:
        torch.cuda.set_device(device)
        _ready.devices.add(device)


def copy_bytes(target: int, source: int, count: int, stream: int) -> None:
    """So many bytes from one address on the device to another, on ``stream``."""
    code = _driver().cuMemcpyDtoDAsync_v2(target, source, count, stream)
    if code:
        _refuse(code)


def new_stream() -> int:
    """The pointer of a new stream on the current device, which is not waited for by the default stream."""
    stream = ctypes.c_void_p()
    _call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    return stream.value or 0


class DriverGraph:
    """What a thread launches on its current stream, which is not the default one, within :meth:`capture`.

    Args:
        handle: a pool as ``torch.cuda.graph_pool_handle()`` names it; what is allocated within the capture lies there.
    """

    def __init__(self, handle: Any):
        self._handle, self._executable = handle, ctypes.c_void_p()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Raises RuntimeError where a call within it cannot be captured."""
        device, stream = torch.cuda.current_device(), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        graph = ctypes.c_void_p()
        torch._C._cuda_beginAllocateCurrentThreadToPool(device, self._handle)
        try:
            _call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)
            try:
                yield
            except BaseException:
                _driver().cuStreamEndCapture(stream, ctypes.byref(graph))
                raise
            _call("cuStreamEndCapture", stream, ctypes.byref(graph))
            _call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0))
        except BaseException:
            torch._C._cuda_releasePool(device, self._handle)
            raise
        else:
            release = weakref.finalize(self, _release, self._executable.value or 0, device, self._handle)
            release.atexit = False
        finally:
            torch._C._cuda_endAllocateToPool(device, self._handle)
            if graph:
                _driver().cuGraphDestroy(graph)

    def replay(self, stream: int) -> None:
        """On ``stream``, as ``torch.cuda.Stream.cuda_stream`` gives it."""
        code = _driver().cuGraphLaunch(self._executable, stream)
        if code:
            _refuse(code)


def _release(executable: int, device: int, handle: Any) -> None:
    _driver().cuGraphExecDestroy(ctypes.c_void_p(executable))
    torch._C._cuda_releasePool(device, handle)
