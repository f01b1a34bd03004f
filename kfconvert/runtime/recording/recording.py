"""One call of a program as a CUDA graph: recorded once, and replayed for other arguments of the same kind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..state.derived import Unchanged
from .capture_streams import capture_stream
from .driver_graph import CopyNode, DriverGraph, copy_bytes, prepare_thread

Call = Callable[[list[Any]], Sequence[Any]]


class Unrecordable(Exception):
    """Why a call cannot be recorded."""


class Pool:
    """The device memory of the recordings of one model.

    All of them share it: a replay overwrites what another was given, has computed on its way, and has copied to its
    caller. Their replays take turns on the device, whatever streams they are launched on.
    """

    def __init__(self, device: torch.device):
        self.device = device
        #: The stream on which calls are recorded.
        self.capture_stream = capture_stream(self, device)
        #: The memory as PyTorch knows it.
        self.handle = _held_memory(self, device)
        self._lock = threading.Lock()
        self._last: torch.cuda.Stream | None = None
        self._last_pointer = -1

    def in_turn(self, launch: Callable[[int], Any]) -> Any:
        """What ``launch`` returns. It gets the current stream of the pool's device, the current one meanwhile; what it
        launches on that comes after all replays before it."""
        index: int = self.device.index
        with self._lock:
            if torch._C._cuda_getDevice() == index:
                return launch(self._stream_after_others(index))
            with torch.cuda.device(index):
                return launch(self._stream_after_others(index))

    def _stream_after_others(self, index: int) -> int:
        prepare_thread(index)
        stream: int = torch._C._cuda_getCurrentRawStream(index)
        if stream != self._last_pointer:
            current = torch.cuda.current_stream()
            if self._last is not None:
                current.wait_stream(self._last)
            self._last, self._last_pointer = current, stream
        return stream


def _held_memory(pool: Pool, device: torch.device) -> Any:
    """Memory that stays until ``pool`` goes, so that new recordings take the place of old ones: without this, PyTorch
    would set it aside after the last recording, and take new memory for the next."""
    handle = torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, handle)
    torch._C._cuda_endAllocateToPool(device.index, handle)
    weakref.finalize(pool, torch._C._cuda_releasePool, device.index, handle).atexit = False
    return handle


@dataclass(frozen=True)
class _Given:
    """An output that is an input as it is."""

    index: int


@dataclass(frozen=True)
class _Fixed:
    """An output that is the same at each replay: a number, None, or a weight as it is."""

    value: Any


class Recording:
    """A recorded call; :meth:`replay` gives the outputs for other inputs.

    The recording reads inputs in the memory of the pool, to which those given are copied, and the weights where they
    lie: it holds for as long as these stay there, and for inputs of the same shapes, strides, dtypes and device.

    Args:
        call: computes the flat outputs from the flat inputs. It has run once before with inputs of this kind, so that
            nothing is left to be set up.
        leaves: the flat inputs.
        weights: the tensors that ``call`` reads beside them, those that it may return among them.
        pool: where the memory of the recording comes from.
        is_random: whether ``call`` draws random numbers.
        static_outputs: whether :meth:`replay` gives the tensors that the recording writes, which the next replay of any
            recording in ``pool`` overwrites.

    Raises:
        Unrecordable: an output is no tensor of its own, or the CUDA graph could not be made.
        torch.OutOfMemoryError: there is too little memory.
    """

    def __init__(
        self,
        call: Call,
        leaves: list[Any],
        weights: Sequence[Tensor],
        pool: Pool,
        is_random: bool = False,
        static_outputs: bool = False,
    ):
        # Numbers in the memory of the host become part of the recording.
        numbers = [tensor for tensor in weights if tensor.device.type == "cpu"]
        if any(tensor.device != pool.device for tensor in weights if tensor.device.type != "cpu"):
            raise Unrecordable("a tensor of the model and the inputs are on different devices")
        self.calls = 0  # for the owner to count
        self.is_random, self._static_outputs = is_random, static_outputs
        self._pool, self._weights = pool, Unchanged(weights, written=True)
        self._numbers, self._unwritten = numbers, Unchanged(numbers)
        before = torch.cuda.memory_reserved(pool.device)
        # Tensors made under inference_mode could not be written to by a replay without it.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(pool.device):
            self._record(call, leaves, weights, is_random)
        #: Bytes by which the memory that PyTorch holds on the device has grown.
        self.bytes = max(0, torch.cuda.memory_reserved(pool.device) - before)

    def _record(self, call: Call, leaves: list[Any], weights: Sequence[Tensor], is_random: bool) -> None:
        """The inputs that the recording reads, and the outputs that it writes, lie in the memory of the pool, which
        nobody but other recordings gets: not even when this one goes while a replay still runs. They are let go once it
        is made, as each replay writes them before it reads them; outputs that are static stay."""
        with _capture(self._pool, is_random) as graph:
            static = [_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            given = [(i, value) for i, value in enumerate(static) if value is not leaves[i]]
            self._inputs = [(i, _Input(graph, value, leaves[i])) for i, value in given]
            self._kinds, written = _kinds_of(call(static), static, weights)
            self._written = written if self._static_outputs else []
            self._outputs = [] if self._static_outputs else [_Output(graph, value) for value in written]
        self._graph = graph

    def is_current(self) -> bool:
        """Whether what became part of the recording is as it was."""
        return not self._numbers or self._unwritten.holds_for(self._numbers)

    def reads(self, weights: list[Tensor]) -> bool:
        """Whether ``weights`` are those that the recording was made with, in the same places."""
        return self._weights.holds_for(weights)

    def replay(self, leaves: list[Any]) -> tuple[Any, ...]:
        """The flat outputs for the flat inputs ``leaves``, in tensors of the caller's own unless they are static. None
        of the leaves may require a gradient that is wanted."""

        def launch(stream: int) -> list[Tensor]:
            for index, copy in self._inputs:
                copy.read(leaves[index], stream)
            found = [output.made() for output in self._outputs]
            self._graph.replay(stream)
            for output, target in zip(self._outputs, found):
                output.write(target, stream)
            return self._written if self._static_outputs else found

        found = iter(self._pool.in_turn(launch))
        return tuple(
            next(found) if kind is None else leaves[kind.index] if isinstance(kind, _Given) else kind.value
            for kind in self._kinds
        )


class Repeated:
    """A recorded call that reads and writes tensors where they lie, and that nobody but its owner uses meanwhile.

    Args:
        call: takes and returns nothing, and draws no random numbers. It has run once before, and all tensors that it
            reads and writes stay.
        pool: where what it makes on its way lies.

    Raises:
        Unrecordable: the CUDA graph could not be made.
        torch.OutOfMemoryError: there is too little memory.
    """

    def __init__(self, call: Callable[[], None], pool: Pool):
        self._pool = pool
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(pool.device):
            with _capture(pool, is_random=False) as graph:
                call()
        self._graph = graph

    def replay(self) -> None:
        """The call once more."""
        self._pool.in_turn(self._graph.replay)


@contextmanager
def _capture(pool: Pool, is_random: bool) -> Iterator[_Graph]:
    """A graph of what is launched within the block. Raises Unrecordable."""
    collecting = gc.isenabled()
    gc.disable()  # a graph that is freed during the recording would end it
    try:
        stream = pool.capture_stream.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            pool.capture_stream.prepare()
            graph: _Graph = _RandomGraph(pool.handle) if is_random else DriverGraph(pool.handle)
            with graph.capture():
                yield graph
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise Unrecordable(str(error).splitlines()[0]) from None
    finally:
        if collecting:
            gc.enable()


class _Input:
    """Copies arguments to a tensor of a recording.

    Args:
        graph: is being captured, and copies by itself where it can.
        held: the tensor of the recording. Only its address is kept, unless that is not enough to copy to it.
        other: an argument; the others have its shape, strides and dtype.
    """

    def __init__(self, graph: _Graph, held: Tensor, other: Tensor):
        count = _bytes_without_gaps(held, other)
        self._held = held if count is None else None
        self._address, self._bytes = held.data_ptr(), count or 0
        self._node = graph.copy(self._address, other.data_ptr(), count) if count else None

    def read(self, source: Tensor, stream: int) -> None:
        """Before a replay: from ``source``."""
        if self._node is not None:
            self._node.read_from(source.data_ptr())
        elif self._held is not None:
            self._held.copy_(source)
        else:
            copy_bytes(self._address, source.data_ptr(), self._bytes, stream)


class _Output:
    """Copies a tensor of a recording, ``held``, to tensors of the caller's; see ``_Input``."""

    def __init__(self, graph: _Graph, held: Tensor):
        count = _bytes_without_gaps(held)
        self._held = held if count is None else None
        self._address, self._bytes, self._make = held.data_ptr(), count or 0, _maker(held)
        # Nobody reads the target of now: each replay is given another.
        self._node = graph.copy(self._make().data_ptr(), self._address, count) if count else None

    def made(self) -> Tensor:
        """Before a replay: the target."""
        target = self._make()
        if self._node is not None:
            self._node.write_to(target.data_ptr())
        return target

    def write(self, target: Tensor, stream: int) -> None:
        """After the replay: to the ``target``, if the graph did not."""
        if self._held is not None:
            target.copy_(self._held)
        elif self._node is None:
            copy_bytes(target.data_ptr(), self._address, self._bytes, stream)


def _bytes_without_gaps(*tensors: Tensor) -> int | None:
    """How many bytes tensors of one shape and strides have. Without gaps all of them are copied, without the cost of an
    operator. None where elements are conjugated or negated when they are read, or others lie between: such are copied
    one by one."""
    first = tensors[0]
    span = 1 + sum((size - 1) * stride for size, stride in zip(first.shape, first.stride()))
    lazy = any(tensor.is_conj() or tensor.is_neg() for tensor in tensors)
    return first.numel() * first.element_size() if first.numel() == span and not lazy else None


class _Graph(Protocol):
    """What a recording asks of a graph."""

    def capture(self) -> AbstractContextManager[None]: ...

    def copy(self, target: int, source: int, count: int) -> CopyNode | None: ...

    def replay(self, stream: int) -> None: ...


class _RandomGraph:
    """A graph that draws other numbers at each replay.

    PyTorch then counts in its generators, for whole graphs in advance, and has other threads draw none while one is
    captured; that is why other graphs are captured without it.
    """

    def __init__(self, handle: Any):
        self._graph, self._handle = torch.cuda.CUDAGraph(), handle

    @contextmanager
    def capture(self) -> Iterator[None]:
        try:
            # Other threads may use the device meanwhile.
            self._graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
            yield
            self._graph.capture_end()
        except BaseException:
            self._abandon()
            raise

    def copy(self, target: int, source: int, count: int) -> None:
        """It has no copies of its own, as PyTorch does not keep the nodes of its graphs."""

    def replay(self, stream: int) -> None:
        self._graph.replay()

    def _abandon(self) -> None:
        """End a capture that has failed. Where the end fails as well, PyTorch goes on taking memory for it, and refuses
        random numbers, until another capture has ended."""
        try:
            self._graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):  # it has not begun
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._handle)
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()


def _like(tensor: Tensor) -> Tensor:
    """An empty tensor that lies in memory as ``tensor`` does."""
    if not _has_no_overlap(tensor):
        raise Unrecordable("elements of an argument share memory")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _kinds_of(
    outputs: Sequence[Any], static: list[Any], weights: Sequence[Tensor]
) -> tuple[list[_Given | _Fixed | None], list[Tensor]]:
    """What each output is, None where a replay writes it, and those that it writes."""
    given = {id(value): index for index, value in enumerate(static) if isinstance(value, Tensor)}
    known = {id(weight) for weight in weights}
    held = {_memory(tensor) for tensor in (*weights, *(value for value in static if isinstance(value, Tensor)))}
    kinds: list[_Given | _Fixed | None] = []
    written: list[Tensor] = []
    for value in outputs:
        if not isinstance(value, Tensor) or id(value) in known:
            kinds.append(_Fixed(value))
        elif id(value) in given:
            kinds.append(_Given(given[id(value)]))
        elif not value.is_cuda:
            raise Unrecordable("an output is in host memory")
        elif value.numel() and _memory(value) in held:
            raise Unrecordable("an output shares memory with another output, an argument or a weight")
        else:
            held.add(_memory(value))
            written.append(value)
            kinds.append(None)
    return kinds, written


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _maker(tensor: Tensor) -> Callable[[], Tensor]:
    """Makes tensors that lie in memory as ``tensor`` does, without holding it."""
    if not _has_no_overlap(tensor):
        raise Unrecordable("elements of an output share memory")
    return partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _has_no_overlap(tensor: Tensor) -> bool:
    """Whether each element has memory of its own: sorted by stride, each dimension lies beyond all before it."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size <= 1:
            continue
        if stride < reach:
            return False
        reach += stride * (size - 1)
    return True
