"""Bytes that a call moves, and the copy bandwidth of a device."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..inputs import ExampleCall
from .sampling import batch_ms

# Much larger than any cache: source and target have 512 MiB in total.
COPY_BYTES = 256 * 2**20
# The number of measurements (the best counts), and the number of copies in each.
COPY_ROUNDS = 5
COPIES_A_ROUND = 4


def copy_bandwidth(device: torch.device | str) -> float:
    """Returns the bandwidth of a 256 MiB copy within `device` in GB/s (10^9 bytes per second), reads plus writes.

    The first call in a process measures it (on the CPU, for each number of threads). Later calls return that value.

    Raises:
        RuntimeError: `device` has less than 512 MiB of free memory (on a GPU its subclass torch.OutOfMemoryError).
        ValueError: `device` is "meta", which has no memory.
    """
    device = torch.device(device)
    if device.type == "meta":
        raise ValueError("copy_bandwidth: the meta device has no memory")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _measured(device, torch.get_num_threads() if device.type == "cpu" else 0)


@functools.cache
def _measured(device: torch.device, threads: int) -> float:
    # Ones, because unwritten CPU memory maps to a single cached page of zeros.
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    copy = functools.partial(torch.empty_like(source).copy_, source)
    copy()
    best_ms = min(batch_ms(copy, COPIES_A_ROUND, device) for _ in range(COPY_ROUNDS))
    return 2 * COPY_BYTES / best_ms / 1e6


def bytes_of_call(fn: Callable[..., Any], call: ExampleCall, outputs: Any) -> int:
    """Returns a lower bound of the bytes that a call reads and writes.

    Each input, output, and parameter or buffer of a module `fn` counts once with its full size. An input that is
    returned after an in-place write counts twice. Other tensors that `fn` reads, intermediate results, and tensors
    without strides (sparse, nested) do not count.
    """
    read = {id(tensor): tensor for tensor in (*call.tensors(), *tensors_of(fn))}
    written = {id(tensor): tensor for tensor in tensors_in(outputs)}
    return sum(map(_bytes, (*read.values(), *written.values())))


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in nested containers that pytree knows."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def tensors_of(fn: Callable[..., Any]) -> Iterable[Tensor]:
    """Returns parameters and buffers of a module; empty for other callables."""
    return (*fn.parameters(), *fn.buffers()) if isinstance(fn, nn.Module) else ()


def _bytes(tensor: Tensor) -> int:
    """Bytes in memory. An expanded dimension counts once."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride()) if stride or size == 0)
    return math.prod(sizes) * tensor.element_size()
