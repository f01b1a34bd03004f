"""One call of a program as a CUDA graph: recorded once, and replayed for other arguments of the same kind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..state.derived import Unchanged
from .capture_streams import capture_stream, one_capture
from .driver_graph import DriverGraph, prepare_thread
from .split import Call, Split


class Unrecordable(Exception):
    """The reason why a call cannot be recorded."""


class Pool:
    """The device memory of the recordings of one model.

    All recordings share it: a replay overwrites the inputs, intermediate values and outputs of other recordings.
    Their replays take turns on the device, whatever streams they use.
    """

    def __init__(self, device: torch.device):
        self.device = device
        #: The stream on which calls are recorded.
        self.capture_stream = capture_stream(self, device)
        #: The pool handle of PyTorch.
        self.handle = _held_memory(self, device)
        self._lock = threading.Lock()
        self._last: torch.cuda.Stream | None = None
        self._last_pointer = -1

    def in_turn(self, launch: Callable[[int], Any]) -> Any:
        """Return the result of ``launch``, which receives the current stream of the pool's device with that device
        current. Its launches on that stream run after all earlier replays."""
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
    """Memory that stays until ``pool`` is deleted, so that new recordings reuse the memory of old ones. Otherwise
    PyTorch would set it aside after the last recording, and allocate new memory for the next."""
    handle = torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, handle)
    torch._C._cuda_endAllocateToPool(device.index, handle)
    weakref.finalize(pool, torch._C._cuda_releasePool, device.index, handle).atexit = False
    return handle


class Recording:
    """A recorded call; :meth:`replay` returns the outputs for other inputs.

    The recording reads inputs from the memory of the pool, to which arguments are copied, and weights in place. It is
    valid while the weights keep their addresses, and for inputs of equal shapes, strides, dtypes and device.

    Args:
        call: computes the flat outputs from the flat inputs, without random numbers. It has run once with such inputs,
            so no setup remains. The tail of a ``Split`` runs after each replay, unless outputs are static.
        leaves: the flat inputs.
        weights: the other tensors that ``call`` reads, including any that it returns.
        pool: where the memory of the recording comes from.
        static_outputs: whether :meth:`replay` returns the tensors that the recording writes, which the next replay of
            any recording in ``pool`` overwrites.

    Raises:
        Unrecordable: an output shares memory, or the CUDA graph could not be created.
        torch.OutOfMemoryError: there is not enough memory.
    """

    def __init__(
        self, call: Call, leaves: list[Any], weights: Sequence[Tensor], pool: Pool, static_outputs: bool = False
    ):
        # Numbers in host memory become part of the recording.
        numbers = [tensor for tensor in weights if tensor.device.type == "cpu"]
        if any(tensor.device != pool.device for tensor in weights if tensor.device.type != "cpu"):
            raise Unrecordable("a tensor of the model and the inputs are on different devices")
        self.calls = 0  # counted by the owner
        self.is_generated = False  # whether TorchInductor generated kernels for it
        self._static_outputs = static_outputs
        self._pool, self._weights = pool, Unchanged(weights, written=True)
        self._numbers, self._unwritten = numbers, Unchanged(numbers)
        before = torch.cuda.memory_reserved(pool.device)
        # A replay outside inference_mode could not write to tensors that were created under it.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(pool.device):
            self._record(call, leaves, weights)
        #: The growth of PyTorch's reserved memory on the device, in bytes.
        self.bytes = max(0, torch.cuda.memory_reserved(pool.device) - before)

    def _record(self, call: Call, leaves: list[Any], weights: Sequence[Tensor]) -> None:
        """The inputs and outputs of the recording are in the memory of the pool, which only other recordings use, even
        if this one is deleted during a replay. Their tensors are released after the capture, as each replay writes them
        before it reads them; static outputs stay."""
        with _capture(self._pool) as graph:
            static = [like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            given = [(i, value) for i, value in enumerate(static) if value is not leaves[i]]
            self._inputs = [(i, _Input(graph, value, leaves[i])) for i, value in given]
            body = call.unfinished if isinstance(call, Split) and not self._static_outputs else call
            self._kinds, written = _kinds_of(body(static), static, weights)
            self._written = written if self._static_outputs else []
            self._outputs = [] if self._static_outputs else [_Output(graph, value) for value in written]
        self._graph = graph

    def is_current(self) -> bool:
        """Whether the values that became part of the recording are unchanged."""
        return not self._numbers or self._unwritten.holds_for(self._numbers)

    def reads(self, weights: list[Tensor]) -> bool:
        """Whether ``weights`` are the weights of the recording, at the same addresses."""
        return self._weights.holds_for(weights)

    def replay(self, leaves: list[Any]) -> tuple[Any, ...]:
        """Return the flat outputs for the flat inputs ``leaves``, as new tensors unless they are static. The leaves
        must not require gradients that the caller needs."""

        def launch(stream: int) -> tuple[Any, ...]:
            for index, copy in self._inputs:
                copy.read(leaves[index])
            found = [output.made() for output in self._outputs]
            self._graph.replay(stream)
            for output, target in zip(self._outputs, found):
                output.write(target)
            made = iter(self._written if self._static_outputs else found)
            return tuple(
                next(made) if kind is None else leaves[kind] if isinstance(kind, int) else kind()
                for kind in self._kinds
            )

        return self._pool.in_turn(launch)


class Repeated:
    """A recorded call that reads and writes tensors in place, and that only its owner uses.

    Args:
        call: takes no arguments, returns nothing and draws no random numbers. It has run once, and all tensors that it
            reads and writes stay alive.
        pool: provides the memory of intermediate values.

    Raises:
        Unrecordable: the CUDA graph could not be created.
        torch.OutOfMemoryError: there is not enough memory.
    """

    def __init__(self, call: Callable[[], None], pool: Pool):
        self._pool = pool
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(pool.device):
            with _capture(pool) as graph:
                call()
        self._graph = graph

    def replay(self) -> None:
        """Run the call again."""
        self._pool.in_turn(self._graph.replay)


@contextmanager
def _capture(pool: Pool) -> Iterator[DriverGraph]:
    """Context manager that captures its launches in a graph. Raises Unrecordable."""
    try:
        with one_capture():
            stream = pool.capture_stream.stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                pool.capture_stream.prepare()
                graph = DriverGraph(pool.handle)
                with graph.capture():
                    yield graph
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise Unrecordable(str(error).splitlines()[0]) from None


class _Input:
    """Copies arguments to a tensor of a recording.

    Args:
        graph: the graph under capture, which contains the copy where it can.
        held: the tensor of the recording. Only its address is kept, unless the copy needs more.
        other: an argument; all arguments have its shape, strides and dtype.
    """

    def __init__(self, graph: DriverGraph, held: Tensor, other: Tensor):
        count = bytes_without_gaps(held, other)
        self._held = held if count is None else None
        self._node = graph.copy(held.data_ptr(), other.data_ptr(), count) if count else None

    def read(self, source: Tensor) -> None:
        """Copy ``source`` before a replay, or let the graph do so."""
        if self._node is not None:
            self._node.read_from(source.data_ptr())
        elif self._held is not None:
            self._held.copy_(source)


class _Output:
    """Copies ``held``, a tensor of a recording, to new tensors for the caller; see ``_Input``."""

    def __init__(self, graph: DriverGraph, held: Tensor):
        count = bytes_without_gaps(held)
        self._held, self._make = held if count is None else None, _maker(held)
        # Nothing reads the current target: each replay sets another one.
        self._node = graph.copy(self._make().data_ptr(), held.data_ptr(), count) if count else None

    def made(self) -> Tensor:
        """Create the target before a replay."""
        target = self._make()
        if self._node is not None:
            self._node.write_to(target.data_ptr())
        return target

    def write(self, target: Tensor) -> None:
        """After the replay, copy to ``target`` unless the graph has done so."""
        if self._held is not None:
            target.copy_(self._held)


def bytes_without_gaps(*tensors: Tensor) -> int | None:
    """The number of bytes of tensors of one shape and strides. Without gaps, one copy transfers all of them, without
    the cost of an operator. None where elements have gaps between them, or the tensor is a conjugate or negative view:
    an operator copies these."""
    first = tensors[0]
    span = 1 + sum((size - 1) * stride for size, stride in zip(first.shape, first.stride()))
    lazy = any(tensor.is_conj() or tensor.is_neg() for tensor in tensors)
    return first.numel() * first.element_size() if first.numel() == span and not lazy else None


def like(tensor: Tensor) -> Tensor:
    """Return an empty tensor with the memory layout of ``tensor``."""
    if not has_no_overlap(tensor):
        raise Unrecordable("elements of an argument share memory")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _kinds_of(
    outputs: Sequence[Any], static: list[Any], weights: Sequence[Tensor]
) -> tuple[list[Callable[[], Any] | int | None], list[Tensor]]:
    """For each output, a call that returns it after a replay, the index of an equal input, or None for an output that a
    replay writes; and the list of the latter. Numbers and unchanged weights are equal in all replays."""
    given = {id(value): index for index, value in enumerate(static) if isinstance(value, Tensor)}
    known = {id(weight) for weight in weights}
    held = {_memory(tensor) for tensor in (*weights, *(value for value in static if isinstance(value, Tensor)))}
    kinds: list[Callable[[], Any] | int | None] = []
    written: list[Tensor] = []
    for value in outputs:
        if not isinstance(value, Tensor) or id(value) in known:
            kinds.append(value if isinstance(value, partial) else partial(lambda equal: equal, value))
        elif id(value) in given:
            kinds.append(given[id(value)])
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
    """Return a function that creates tensors with the memory layout of ``tensor``, without keeping it alive."""
    if not has_no_overlap(tensor):
        raise Unrecordable("elements of an output share memory")
    return partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def has_no_overlap(tensor: Tensor) -> bool:
    """Whether no two elements share memory: sorted by stride, each dimension steps beyond the extent of all before."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size <= 1:
            continue
        if stride < reach:
            return False
        reach += stride * (size - 1)
    return True
