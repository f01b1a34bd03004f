"""Compiled training graphs as CUDA graphs, where launching the kernels takes much of the time.

Forward and backward are recorded once, and then replayed. A recording reads and writes the same memory in each replay:
arguments are copied to it, and what a caller receives, outputs and gradients, is copied from it. Tensors that forward
saves for backward stay in that memory, which backward reuses as it reads them. While they are alive, further calls
launch the compiled kernels instead; so do a backward that retains the graph, and calls under hooks for saved tensors,
which may keep some of them.

TorchInductor records too (``triton.cudagraphs``), but its results are valid for one step only, and in PyTorch 2.11 it
can raise an error where a second forward runs before backward.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import compile_fx, config
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.multiprocessing.reductions import StorageWeakRef

from ..runtime import can_record
from .cuda_recording import Launch, Recording

# A graph is recorded if the launches of its forward take at least this share of their time on the device. Otherwise the
# launches run ahead of the device, and copies of the gradients would cost more than a recording saves.
_LAUNCH_SHARE = 0.4
# Calls with unchanged addresses before a recording. The last one is measured: the first one sets up kernels and
# libraries, and the second one may wait for memory, as the optimizer has allocated its state.
_CALLS_BEFORE = 3
# A graph whose weights move more often is no longer recorded. Layers that share one graph move them in each call.
_MOST_MOVES = 32
# Libraries whose operators do not wait for the device. A capture that fails there would make PyTorch 2.11 refuse all
# further random numbers.
_ASYNCHRONOUS = "aten", "prims", "prim", "inductor_prims", "kfconvert"


def is_recordable(inputs: Sequence[Any]) -> bool:
    """Whether all inputs are tensors of fixed sizes on one device that records, and neither TorchInductor records nor
    another process takes part."""
    if config.triton.cudagraphs or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    fixed = all(isinstance(each, Tensor) and all(isinstance(size, int) for size in each.shape) for each in inputs)
    devices = {each.device for each in inputs} if fixed else set()
    return len(devices) == 1 and all(map(can_record, devices))


def compile_recorded(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Compiles a graph that ``is_recordable``. Its first calls launch the kernels; later calls replay them."""
    # A hit in AOTAutograd's cache would return the graph without recordings.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        return compile_fx.compile_fx(module, inputs, inner_compile=partial(_compile_inner, _Step(inputs[0].device)))


def _compile_inner(step: _Step, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    is_capturable = _is_capturable(module) and all(isinstance(each, Tensor) for each in inputs)
    compiled = compile_fx.compile_fx_inner(module, inputs, **options)
    if not is_capturable or not isinstance(compiled, CompiledFxGraph) or compiled.disabled_cudagraphs_reason:
        return compiled
    launch: Any = compiled.current_callable
    is_backward = options.get("is_backward")
    weights = () if is_backward else options.get("static_input_idxs", ())
    if not set(compiled.mutated_input_idxs).issubset(weights):
        return compiled  # a recording would write to its copy of an argument
    recorded: Any
    if is_backward:
        recorded = _Backward(step, launch)
    else:
        # The results of forward are what its caller receives, then the tensors for backward.
        metadata: Any = torch._guards.TracingContext.get().fw_metadata
        received = None if options.get("is_inference") else metadata.num_forward_returns
        recorded = _Forward(step, launch, weights, received)
    compiled.current_callable = recorded
    return compiled


def _is_capturable(module: fx.GraphModule) -> bool:
    """Whether no operator of the graph waits for the device."""
    values = [node.meta.get("val") for node in module.graph.nodes]
    operators = [node.target for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return (
        len({value.device for value in values if isinstance(value, Tensor)}) == 1
        and all(operator.namespace in _ASYNCHRONOUS for operator in operators)
        and get_first_incompatible_cudagraph_node(module) is None
    )


class _Step:
    """The recordings of a graph on ``device``, and what they share."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.lock = device, threading.Lock()
        self.clear([])

    def clear(self, weights: list[int]) -> None:
        """Drops the recordings. The next ones use weights at these addresses."""
        self.weights = weights
        self.forward: Recording | None = None
        self.backward: Recording | None = None
        self._pool = torch.cuda.graph_pool_handle()
        #: Addresses of the tensors that forward saves in the recording's memory.
        self.saved: set[int] = set()
        #: A saved tensor that each replay copies. While it is alive, backward may still read the others.
        self.witness: StorageWeakRef | None = None

    def record(self, launch: Launch, arguments: list[Any], in_place: Sequence[int]) -> Recording | None:
        """Records ``launch``; None where that fails. Saved tensors lose their memory to the recording of backward, and
        stay valid until its next replay."""
        if self.forward is not None:
            self.forward.disown(self.saved)
        torch.cuda.empty_cache()  # a recording cannot use PyTorch's free memory
        try:
            return Recording(launch, arguments, in_place, self.saved, self._pool)
        except Exception:  # a call that cannot be captured, an unexpected memory layout, or not enough memory
            return None


class _Forward:
    """A forward pass.

    Args:
        step: is shared with the backward pass.
        launch: launches the kernels. It takes a list of tensors, which it clears, and returns the results.
        weights: the indices of arguments that usually keep their addresses.
        received: the number of results that a caller receives, which come first; None for all.
    """

    def __init__(self, step: _Step, launch: Launch, weights: Sequence[int], received: int | None):
        self._step, self._launch, self._weights, self._received = step, launch, weights, received
        self._calls = self._moves = 0
        self._is_wanted = True
        self._witness: int | None = None  # its index

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        with self._step.lock, torch.cuda.device(self._step.device):
            run = self._run(arguments) if self._is_wanted and _may_replay() else None
            return (run or self._launch)(arguments)

    def _run(self, arguments: list[Any]) -> Launch | None:
        """How to run the call, if not by ``_launch``."""
        step, addresses = self._step, [arguments[index].data_ptr() for index in self._weights]
        if step.witness is not None and not step.witness.expired():
            return None
        if addresses != step.weights:
            step.clear(addresses)
            self._calls = 0
            self._moves += 1
            self._is_wanted = self._moves <= _MOST_MOVES
        if step.forward is None:
            self._calls += 1
            if self._calls == _CALLS_BEFORE:
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
        step = self._step
        recording = step.record(self._launch, arguments, self._weights)
        results = [] if recording is None else recording.results
        received = len(results) if self._received is None else self._received
        memories = [each.untyped_storage()._cdata for each in results[:received] if isinstance(each, Tensor)]
        if recording is None or len(set(memories)) < len(memories):  # copies would not share memory as the results do
            self._is_wanted = False
            return
        step.forward = recording
        saved = {
            index: each
            for index, each in enumerate(results)
            if index >= received and isinstance(each, Tensor) and each.data_ptr() not in step.weights
        }
        sizes = {index: each.numel() for index, each in saved.items() if each.device == step.device}
        self._witness = min(sizes, key=sizes.__getitem__, default=None)
        recording.copy_out([*range(received), *([] if self._witness is None else [self._witness])])
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

    def __init__(self, step: _Step, launch: Launch):
        self._step, self._launch = step, launch
        self._calls = 0
        self._is_wanted = True

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        with self._step.lock, torch.cuda.device(self._step.device):
            recording = self._recording(arguments) if self._is_wanted else None
            return self._launch(arguments) if recording is None else recording.replay(arguments)

    def _recording(self, arguments: list[Any]) -> Recording | None:
        step = self._step
        self._calls += 1
        if step.forward is None or self._calls <= 1 or torch.cuda.is_current_stream_capturing():
            return None
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return None
        addresses = [each.data_ptr() for each in arguments]
        if step.backward is None and step.saved.issubset(addresses):
            fixed = step.saved.union(step.weights)
            in_place = [index for index, address in enumerate(addresses) if address in fixed]
            step.backward = step.record(self._launch, arguments, in_place)
            self._is_wanted = step.backward is not None
        found = step.backward
        return found if found is not None and found.serves(addresses) and found.is_on_its_stream() else None


def _may_replay() -> bool:
    """Whether nobody captures the call, or has hooks for the tensors that it saves."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is None and not torch.cuda.is_current_stream_capturing()
