"""CUDA graphs through the driver API, with memory from PyTorch's pools.

``torch.cuda.CUDAGraph`` does more: during its capture, no other thread of the process can draw random numbers on the
device, and a failed capture leaves the process in that state. The calls are from the CUDA driver API, "Graph
Management" and "Stream Management".
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

# The stream and the legacy default stream do not wait for each other.
_NON_BLOCKING = 1
# Only uncapturable calls of the capturing thread end a capture.
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
    """Whether the driver API is available: not for AMD GPUs, which PyTorch also calls CUDA devices, nor on Windows."""
    try:
        return torch.version.cuda is not None and bool(_driver())
    except OSError:
        return False


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        _refuse(code)


def _refuse(code: int) -> NoReturn:
    """Raises RuntimeError with the driver's name for the error."""
    found = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(found))
    raise RuntimeError((found.value or b"CUDA error").decode())


class _Ready(threading.local):
    """The devices whose context this thread has used. The driver uses the thread's current context, which the first
    runtime call in the thread sets."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_ready = _Ready()


def prepare_thread(device: int) -> None:
    """Prepare the current thread for copies, replays and new streams on ``device``, its current one."""
    if device not in _ready.devices:
        torch.cuda.set_device(device)
        _ready.devices.add(device)


def new_stream() -> int:
    """Return the pointer of a new stream on the current device; the default stream does not wait for it."""
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
    """A copy node of a graph whose source or target address changes per replay: cheaper than a copy outside the graph.

    Both methods apply to later replays.
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
    """A graph of the operations that a thread launches on its current, non-default stream within :meth:`capture`.

    Args:
        handle: a pool from ``torch.cuda.graph_pool_handle()``, which provides all memory allocated during the capture.
    """

    def __init__(self, handle: Any):
        self._handle, self._executable, self._context = handle, ctypes.c_void_p(), ctypes.c_void_p()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Context manager that captures; raises RuntimeError where a call cannot be captured."""
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
            # The graph stays, because address updates refer to its nodes.
            made = self._executable.value or 0, graph.value or 0
            weakref.finalize(self, _release, *made, device, self._handle).atexit = False
        finally:
            torch._C._cuda_endAllocateToPool(device, self._handle)

    def copy(self, target: int, source: int, count: int) -> CopyNode:
        """Within :meth:`capture`, add a copy of ``count`` bytes between two addresses on the device."""
        stream = torch.cuda.current_stream().cuda_stream
        code = _driver().cuMemcpyDtoDAsync_v2(target, source, count, stream)
        if code:
            _refuse(code)
        # The stream's next operation depends on its last node, which is this copy.
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        nodes, nodes_count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
        found = map(ctypes.byref, (status, number, graph, nodes, nodes_count))
        _call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *found)
        return CopyNode(self, nodes[0])

    def set_copy(self, node: int, parameters: int) -> None:
        """Set the parameters of a copy node, given by their address, for later replays."""
        code = _driver().cuGraphExecMemcpyNodeSetParams(self._executable, node, parameters, self._context)
        if code:
            _refuse(code)

    def replay(self, stream: int) -> None:
        """Launch the graph on ``stream``, a value of ``torch.cuda.Stream.cuda_stream``."""
        code = _driver().cuGraphLaunch(self._executable, stream)
        if code:
            _refuse(code)


def _release(executable: int, graph: int, device: int, handle: Any) -> None:
    _driver().cuGraphExecDestroy(ctypes.c_void_p(executable))
    _driver().cuGraphDestroy(ctypes.c_void_p(graph))
    torch._C._cuda_releasePool(device, handle)
