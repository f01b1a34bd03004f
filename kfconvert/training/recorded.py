"""Compiled training graphs as CUDA graphs, where launching the kernels takes much of the time.

Forward and backward are recorded once, and then replayed. A recording reads and writes the same memory in each replay:
arguments are copied to it, and what a caller receives, outputs and gradients, is copied from it. Tensors that forward
saves for backward stay in that memory, which backward reuses as it reads them. While they are alive, further calls
launch the compiled kernels instead; so does a backward that retains the graph.

TorchInductor records too (``triton.cudagraphs``), but its results are valid for one step only, and in PyTorch 2.11 it
can raise an error where a second forward runs before backward.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import compile_fx
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.multiprocessing.reductions import StorageWeakRef

from ..runtime import CaptureStream

# A graph is recorded if the launches of its forward take at least this share of their time on the device. Otherwise the
# launches run ahead of the device, and copies of the gradients would cost more than a recording saves.
_LAUNCH_SHARE = 0.4
# Calls with unchanged addresses before a recording. The first one sets up kernels and libraries, the others are
# measured: the optimizer allocates its state after the first, so that the second one may wait for memory.
_CALLS_BEFORE = 3
# A graph whose weights move more often is no longer recorded.
_MOST_RECORDINGS = 4

# By the stream on which recordings run: their replays take turns, and so share the workspaces of libraries.
_capture_streams: dict[torch.cuda.Stream, CaptureStream] = {}
# One capture at a time in a process.
_capturing = threading.Lock()

_Launch = Callable[[list[Any]], Sequence[Any]]


def can_record(inputs: Sequence[Any]) -> bool:
    """Whether all inputs are tensors of fixed sizes on one CUDA device, and no other process takes part."""
    if torch.version.cuda is None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    fixed = all(isinstance(each, Tensor) and all(isinstance(size, int) for size in each.shape) for each in inputs)
    return fixed and [device.type for device in {each.device for each in inputs}] == ["cuda"]


def compile_recorded(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Compiles a graph for which ``can_record`` holds. Its first calls launch the kernels; later calls replay them."""
    # A hit in AOTAutograd's cache would return the graph without recordings.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        return compile_fx.compile_fx(module, inputs, inner_compile=partial(_compile_inner, _Step()))


def _compile_inner(step: _Step, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    values = [node.meta.get("val") for node in module.graph.nodes]
    devices = {value.device for value in values if isinstance(value, Tensor)}
    is_capturable = len(devices) == 1 and get_first_incompatible_cudagraph_node(module) is None
    is_capturable &= all(isinstance(each, Tensor) for each in inputs)
    compiled: Any = compile_fx.compile_fx_inner(module, inputs, **options)
    launch, written = compiled.current_callable, set(compiled.mutated_input_idxs)
    weights = () if options.get("is_backward") else options.get("static_input_idxs", ())
    if not is_capturable or not written.issubset(weights):  # a recording would write to its copy of an argument
        return compiled
    if options.get("is_backward"):
        compiled.current_callable = _Backward(step, launch)
    else:
        # The results of forward are what its caller receives, then the tensors for backward.
        metadata: Any = torch._guards.TracingContext.get().fw_metadata
        received = None if options.get("is_inference") else metadata.num_forward_returns
        compiled.current_callable = _Forward(step, launch, weights, received)
    return compiled


class _Step:
    """The recordings of a graph, and what they share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clear([])

    def clear(self, weights: list[int]) -> None:
        """Drops the recordings. The next ones use weights at these addresses."""
        self.weights = weights
        self.forward: _Recording | None = None
        self.backward: _Recording | None = None
        self._pool = torch.cuda.graph_pool_handle()
        #: Addresses of the tensors that forward saves in the recording's memory.
        self.saved: set[int] = set()
        #: A saved tensor that each replay copies. While it is alive, backward may still read the others.
        self.witness: StorageWeakRef | None = None

    def record(self, launch: _Launch, arguments: list[Any]) -> _Recording | None:
        """Records ``launch``; None where that fails. Saved tensors lose their memory to the recording of backward, and
        stay valid until its next replay."""
        if self.forward is not None:
            self.forward.disown(self.saved)
        torch.cuda.empty_cache()  # a recording cannot use PyTorch's free memory
        try:
            return _Recording(launch, arguments, set(self.weights), self.saved, self._pool)
        except RuntimeError:  # a call that cannot be captured, or not enough memory
            return None


class _Forward:
    """A forward pass.

    Args:
        step: is shared with the backward pass.
        launch: launches the kernels. It takes a list of tensors, which it clears, and returns the results.
        weights: the indices of arguments that usually keep their addresses.
        received: the number of results that a caller receives, which come first; None for all.
    """

    def __init__(self, step: _Step, launch: _Launch, weights: Sequence[int], received: int | None):
        self._step, self._launch, self._weights, self._received = step, launch, weights, received
        self._calls = self._records = 0
        self._is_wanted = True
        self._witness: int | None = None  # its index

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        with self._step.lock:
            run = self._run(arguments) if self._is_wanted and not torch.cuda.is_current_stream_capturing() else None
            return (run or self._launch)(arguments)

    def _run(self, arguments: list[Any]) -> _Launch | None:
        """How to run the call, if not by ``_launch``."""
        step, addresses = self._step, [arguments[index].data_ptr() for index in self._weights]
        if step.witness is not None and not step.witness.expired():
            return None
        if addresses != step.weights:
            step.clear(addresses)
            self._calls = 0
        if step.forward is None:
            self._calls += 1
            if 1 < self._calls <= _CALLS_BEFORE:
                return self._measured
            if self._calls > _CALLS_BEFORE:
                self._record(arguments)
        return self._replayed if step.forward is not None and step.forward.is_on_its_stream() else None

    def _measured(self, arguments: list[Any]) -> Sequence[Any]:
        """Launches the kernels, and measures whether that takes much of their time. The time of this thread leaves out
        what other processes take."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin = time.thread_time()
        start.record()
        results = self._launch(arguments)
        end.record()
        launches = time.thread_time() - begin
        torch.cuda.synchronize()
        self._is_wanted = launches * 1e3 >= _LAUNCH_SHARE * start.elapsed_time(end)
        return results

    def _record(self, arguments: list[Any]) -> None:
        self._records += 1
        step = self._step
        step.forward = step.record(self._launch, arguments) if self._records <= _MOST_RECORDINGS else None
        if step.forward is None:
            self._is_wanted = False
            return
        results = step.forward.results
        received = len(results) if self._received is None else self._received
        saved = {
            index: each
            for index, each in enumerate(results)
            if index >= received and isinstance(each, Tensor) and each.data_ptr() not in step.weights
        }
        self._witness = min((i for i in saved if saved[i].is_cuda), key=lambda i: saved[i].numel(), default=None)
        step.forward.copy_out([*range(received), *([] if self._witness is None else [self._witness])])
        step.saved = {each.data_ptr() for index, each in saved.items() if index != self._witness}

    def _replayed(self, arguments: list[Any]) -> Sequence[Any]:
        assert self._step.forward is not None
        results = self._step.forward.replay(arguments)
        if self._witness is not None:
            self._step.witness = StorageWeakRef(results[self._witness].untyped_storage())
        return results


class _Backward:
    """A backward pass, with ``step`` and ``launch`` as in ``_Forward``. The recording serves calls whose saved tensors
    are in the memory of forward's recording."""

    def __init__(self, step: _Step, launch: _Launch):
        self._step, self._launch = step, launch
        self._calls = 0
        self._is_wanted = True

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        with self._step.lock:
            recording = self._recording(arguments) if self._is_wanted else None
            return self._launch(arguments) if recording is None else recording.replay(arguments)

    def _recording(self, arguments: list[Any]) -> _Recording | None:
        step = self._step
        self._calls += 1
        if step.forward is None or self._calls <= 1 or torch.cuda.is_current_stream_capturing():
            return None
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return None
        addresses = [each.data_ptr() for each in arguments]
        if step.backward is None and step.saved.issubset(addresses):
            step.backward = step.record(self._launch, arguments)
            self._is_wanted = step.backward is not None
        found = step.backward
        return found if found is not None and found.serves(addresses) and found.is_on_its_stream() else None


class _Recording:
    """A CUDA graph of a call of ``launch``, which needs no further set-up.

    Args:
        arguments: tensors.
        weights: addresses of arguments that all replays read in place.
        saved: addresses of arguments in memory of an earlier recording, which all replays read and may overwrite. These
            arguments are replaced by tensors that do not own this memory.
        pool: a handle of ``torch.cuda.graph_pool_handle``, of the earlier recording too.

    Raises:
        RuntimeError: a call in ``launch`` cannot be captured.
        torch.OutOfMemoryError: there is not enough memory.
    """

    def __init__(self, launch: _Launch, arguments: list[Any], weights: set[int], saved: set[int], pool: Any):
        addresses = [each.data_ptr() for each in arguments]
        self._in_place = [index for index, address in enumerate(addresses) if address in weights or address in saved]
        self._addresses = [addresses[index] for index in self._in_place]
        self._copied = sorted({*range(len(addresses))}.difference(self._in_place))
        self._stream = torch.cuda.current_stream()
        held = list(arguments)
        for index, address in enumerate(addresses):
            if address in saved:
                arguments[index] = _unowned(arguments[index])
        with _capture(self._stream, pool) as self._graph:
            for index in self._copied:
                held[index] = _like(arguments[index])
            self._held = [held[index] for index in self._copied]
            #: Which each replay writes.
            self.results = list(launch(held))  # which clears the list
        self.copy_out(range(len(self.results)))

    def disown(self, addresses: set[int]) -> None:
        """Lets later allocations in the pool use the memory of results at these addresses."""
        for index, each in enumerate(self.results):
            if isinstance(each, Tensor) and each.data_ptr() in addresses:
                self.results[index] = _unowned(each)

    def copy_out(self, indices: Sequence[int]) -> None:
        """Lets replays return new tensors for the results with these ``indices``; initially for all."""
        kinds = defaultdict[Any, list[int]](list)
        for index in indices:
            if isinstance(self.results[index], Tensor):
                kinds[self.results[index].device, self.results[index].dtype].append(index)
        self._groups = [(group, [self.results[index] for index in group]) for group in kinds.values()]

    def is_on_its_stream(self) -> bool:
        """Whether the current stream is the one of the recorded call. On others, replays could overlap."""
        return self._stream == torch.cuda.current_stream()

    def serves(self, addresses: list[int]) -> bool:
        """Whether a call whose arguments have these addresses passes those that the recording reads in place."""
        return [addresses[index] for index in self._in_place] == self._addresses

    def replay(self, arguments: list[Any]) -> list[Any]:
        """Returns the results, and clears ``arguments``."""
        with torch.no_grad():
            for dtype in {each.dtype for each in self._held}:
                pairs = [pair for pair in zip(self._held, self._copied) if pair[0].dtype == dtype]
                torch._foreach_copy_([held for held, _ in pairs], [arguments[index] for _, index in pairs])
            arguments.clear()
            self._graph.replay()
            results = list(self.results)
            for indices, values in self._groups:
                # One launch, which also allocates; the product with one is exact.
                multiplied = values[0].is_cuda and values[0].is_floating_point()
                copies = torch._foreach_mul(values, 1.0) if multiplied else [each.clone() for each in values]
                for index, copy in zip(indices, copies):
                    results[index] = copy
        return results


@contextmanager
def _capture(current: torch.cuda.Stream, pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Context manager that captures launches for replays on the stream ``current``. Unlike recordings of programs,
    these may draw random numbers, for which ``torch.cuda.CUDAGraph`` advances the generator in each replay."""
    graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
    with _capturing:
        gc.disable()  # freeing another graph would end the capture
        try:
            if current not in _capture_streams:
                _capture_streams[current] = CaptureStream(current.device)
            stream = _capture_streams[current].stream
            stream.wait_stream(current)
            with torch.no_grad(), torch.cuda.stream(stream):
                _capture_streams[current].prepare()
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    yield graph
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()


def _like(tensor: Tensor) -> Tensor:
    """A tensor with the shape and strides of ``tensor``; its elements must not share memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class _Bytes:
    """Memory on a device, for ``torch.as_tensor``."""

    def __init__(self, address: int, count: int):
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 2}


def _unowned(tensor: Tensor) -> Tensor:
    """A tensor with the same memory, which does not keep it allocated."""
    storage = tensor.untyped_storage()
    if not (tensor.is_cuda and storage.nbytes()):
        return tensor
    memory = torch.as_tensor(_Bytes(storage.data_ptr(), storage.nbytes()), device=tensor.device)
    whole = memory[: storage.nbytes() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
