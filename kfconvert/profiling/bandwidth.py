"""Bytes that a call has to move, and how fast a device moves bytes."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..inputs import ExampleCall
from .sampling import batch_ms

# Large against every cache: source and target are 512 MiB together.
COPY_BYTES = 256 * 2**20
# The best of so many measurements counts, each of so many copies in a row.
COPY_ROUNDS = 5
COPIES_A_ROUND = 4


def copy_bandwidth(device: torch.device | str) -> float:
    """GB/s (10^9 bytes a second) at which a copy within `device` reads and writes 256 MiB, both counted.

    It is measured at the first question of a process (on the CPU, for each number of threads) and kept.

    Raises:
        RuntimeError: `device` has not 512 MiB left (on a GPU torch.OutOfMemoryError, which is one).
        ValueError: `device` is "meta", which has no memory.
    """
    device = torch.device(device)
    if device.type == "meta":
        raise ValueError("copy_bandwidth: nothing is moved on the device meta")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _measured(device, torch.get_num_threads() if device.type == "cpu" else 0)


@functools.cache
def _measured(device: torch.device, threads: int) -> float:
    # Ones: memory of the CPU that nobody has written to is one page of zeros in the cache.
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    copy = functools.partial(torch.empty_like(source).copy_, source)
    copy()
    best_ms = min(batch_ms(copy, COPIES_A_ROUND, device) for _ in range(COPY_ROUNDS))
    return 2 * COPY_BYTES / best_ms / 1e6


def bytes_of_call(fn: Callable[..., Any], call: ExampleCall, outputs: Any) -> int:
    """Bytes of all tensors that a call reads and writes at least.

    Each input, each parameter and buffer where `fn` is a module, and each output counts once (one that is
    written in place as input and as output), whatever is read of it. What `fn` finds elsewhere, intermediate
    results, and tensors without strides (sparse, nested) do not count.
    """
    read = {id(tensor): tensor for tensor in (*call.tensors(), *tensors_of(fn))}
    written = {id(tensor): tensor for tensor in tensors_in(outputs)}
    return sum(map(_bytes, (*read.values(), *written.values())))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in any nesting of containers that pytree knows."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def tensors_of(fn: Callable[..., Any]) -> Iterable[Tensor]:
    """Parameters and buffers of a module; nothing of another callable."""
    return (*fn.parameters(), *fn.buffers()) if isinstance(fn, nn.Module) else ()


def _bytes(tensor: Tensor) -> int:
    """Bytes in memory: an expanded dimension is there once."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride()) if stride or size == 0)
    return math.prod(sizes) * tensor.element_size()
