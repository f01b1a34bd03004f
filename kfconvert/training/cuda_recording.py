"""A compiled pass as a CUDA graph, which reads and writes the same memory in each replay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..runtime import CaptureStream, Unrecordable, bytes_without_gaps, has_no_overlap, like, one_capture

# By the stream on which recordings run: their replays take turns, and so share the workspaces of libraries.
_capture_streams: dict[torch.cuda.Stream, CaptureStream] = {}
# Dtypes for which one kernel copies many tensors.
_MULTIPLIED = torch.float32, torch.bfloat16, torch.float16, torch.float64

#: Launches the kernels of a pass. It takes a list of tensors, which it clears, and returns the results.
Launch = Callable[[list[Any]], Sequence[Any]]


class Recording:
    """A CUDA graph of a call of ``launch``, which needs no further set-up.

    Args:
        arguments: tensors.
        in_place: indices of arguments that all replays read in place.
        saved: addresses of arguments in memory of an earlier recording, which replays may overwrite. These arguments
            are replaced by tensors that do not own this memory.
        pool: a handle of ``torch.cuda.graph_pool_handle``, of the earlier recording too.

    Raises:
        Unrecordable: elements of an argument share memory.
        RuntimeError: a call in ``launch`` cannot be captured.
        torch.OutOfMemoryError: there is not enough memory.
    """

    def __init__(self, launch: Launch, arguments: list[Any], in_place: Sequence[int], saved: set[int], pool: Any):
        addresses = [each.data_ptr() for each in arguments]
        self._in_place = list(in_place)
        self._addresses = [addresses[index] for index in self._in_place]
        self._copied = sorted({*range(len(addresses))}.difference(self._in_place))
        self._stream = torch.cuda.current_stream()
        if not all(has_no_overlap(arguments[index]) for index in self._copied):
            raise Unrecordable("elements of an argument share memory")
        held = list(arguments)
        for index in self._in_place:
            if addresses[index] in saved:
                arguments[index] = _unowned(arguments[index])
        with _capture(self._stream, pool) as self._graph:
            for index in self._copied:
                held[index] = like(arguments[index])
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
        #: Pairs of index and result that are copied one by one, and by dtype those that one kernel copies.
        self._single: list[tuple[int, Tensor]] = []
        self._groups = defaultdict[torch.dtype, list[tuple[int, Tensor]]](list)
        for index in indices:
            if isinstance(each := self.results[index], Tensor):
                is_grouped = each.is_cuda and each.dtype in _MULTIPLIED and bytes_without_gaps(each) is not None
                (self._groups[each.dtype] if is_grouped else self._single).append((index, each))

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
            for group in self._groups.values():
                # One launch, which also allocates; the product with one is exact.
                for (index, _), copy in zip(group, torch._foreach_mul([value for _, value in group], 1.0)):
                    results[index] = copy
            for index, value in self._single:
                results[index] = like(value).copy_(value) if has_no_overlap(value) else value.clone()
        return results


@contextmanager
def _capture(current: torch.cuda.Stream, pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Context manager that captures launches for replays on the stream ``current``. Unlike recordings of programs,
    these may draw random numbers, for which ``torch.cuda.CUDAGraph`` advances the generator in each replay."""
    graph = torch.cuda.CUDAGraph()
    with one_capture(), torch.inference_mode(False), torch.no_grad():
        if current not in _capture_streams:
            _capture_streams[current] = CaptureStream(current.device)
        stream = _capture_streams[current].stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            _capture_streams[current].prepare()
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                graph.capture_end()


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
