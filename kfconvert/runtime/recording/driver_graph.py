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
    driver.cuGraphExecMemcpyNodeSetParams.argtypes = [ctypes.c_void_p] * 4
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
    """To be called in a thread, with ``device`` its current one, before it copies, replays or makes streams there."""
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


class _CopyParameters(ctypes.Structure):
    """CUDA_MEMCPY3D of the driver API."""

    _fields_ = tuple(
        (side + name, kind)
        for side in ("src", "dst")
        for name, kind in (
            ("XInBytes", ctypes.c_size_t),
            ("Y", ctypes.c_size_t),
            ("Z", ctypes.c_size_t),
            ("LOD", ctypes.c_size_t),
            ("MemoryType", ctypes.c_int),
            ("Host", ctypes.c_void_p),
            ("Device", ctypes.c_uint64),
            ("Array", ctypes.c_void_p),
            ("Reserved", ctypes.c_void_p),
            ("Pitch", ctypes.c_size_t),
            ("Height", ctypes.c_size_t),
        )
    ) + (("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t), ("Depth", ctypes.c_size_t))


class CopyNode:
    """A copy within a graph, from or to another address at each replay: cheaper than a copy beside the graph.

    Both methods count for the replays from then on.
    """

    __slots__ = ("_address", "_graph", "_node", "_parameters")

    def __init__(self, graph: DriverGraph, node: int):
        self._graph, self._node, self._parameters = graph, node, _CopyParameters()
        _call("cuGraphMemcpyNodeGetParams", ctypes.c_void_p(node), ctypes.byref(self._parameters))
        self._address = ctypes.addressof(self._parameters)

    def read_from(self, address: int) -> None:
        if self._parameters.srcDevice != address:
            self._parameters.srcDevice = address
            self._graph.set_copy(self._node, self._address)

    def write_to(self, address: int) -> None:
        if self._parameters.dstDevice != address:
            self._parameters.dstDevice = address
            self._graph.set_copy(self._node, self._address)


class DriverGraph:
    """What a thread launches on its current stream, which is not the default one, within :meth:`capture`.

    Args:
        handle: a pool as ``torch.cuda.graph_pool_handle()`` names it; what is allocated within the capture lies there.
    """

    def __init__(self, handle: Any):
        self._handle, self._executable, self._context = handle, ctypes.c_void_p(), ctypes.c_void_p()

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
            _call("cuCtxGetCurrent", ctypes.byref(self._context))
        except BaseException:
            torch._C._cuda_releasePool(device, self._handle)
            if graph:
                _driver().cuGraphDestroy(graph)
            raise
        else:
            # The graph stays, as its nodes are named when they are given other addresses.
            made = self._executable.value or 0, graph.value or 0
            weakref.finalize(self, _release, *made, device, self._handle).atexit = False
        finally:
            torch._C._cuda_endAllocateToPool(device, self._handle)

    def copy(self, target: int, source: int, count: int) -> CopyNode:
        """Within :meth:`capture`: a copy of so many bytes from one address on the device to another."""
        stream = torch.cuda.current_stream().cuda_stream
        copy_bytes(target, source, count, stream)
        # What comes next on the stream waits for its last node, which is this copy.
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        nodes, nodes_count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
        found = map(ctypes.byref, (status, number, graph, nodes, nodes_count))
        _call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *found)
        return CopyNode(self, nodes[0])

    def set_copy(self, node: int, parameters: int) -> None:
        """Let the node have the parameters at this address from the next replay on."""
        code = _driver().cuGraphExecMemcpyNodeSetParams(self._executable, node, parameters, self._context)
        if code:
            _refuse(code)

    def replay(self, stream: int) -> None:
        """On ``stream``, as ``torch.cuda.Stream.cuda_stream`` gives it."""
        code = _driver().cuGraphLaunch(self._executable, stream)
        if code:
            _refuse(code)


def _release(executable: int, graph: int, device: int, handle: Any) -> None:
    _driver().cuGraphExecDestroy(ctypes.c_void_p(executable))
    _driver().cuGraphDestroy(ctypes.c_void_p(graph))
    torch._C._cuda_releasePool(device, handle)
