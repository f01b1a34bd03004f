"""Fingerprints of tensors: numbers that differ for different contents, which detect writes without a trace."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...process import shard_of

try:
    from ..._C import fingerprint as _of_memory
except ImportError:  # kfconvert doctor reports why
    _of_memory = None

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The number of elements that are widened at once on devices other than the CPU.
_CHUNK = 1 << 22


def fingerprints(tensors: Iterable[Tensor | None]) -> list[int]:
    """Return a 64-bit number for each tensor; 0 for None, and for a wrapper subclass, which has no memory. Of a
    distributed tensor, this rank's shard counts.

    On the CPU, a hash of the bytes (csrc/fingerprint.h). Elsewhere, the sum of the elements' bits, each multiplied by a
    different odd number: a change of one element always changes that sum. All sums of a device are fetched at once.
    """
    found: list[Any] = [0 if tensor is None else _fingerprint(tensor) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for index, item in enumerate(found):
        if isinstance(item, Tensor):
            by_device.setdefault(item.device, []).append(index)
    for indices in by_device.values():
        numbers = torch.stack([found[index] for index in indices]).tolist()
        for index, number in zip(indices, numbers):
            found[index] = number
    return found


def may_fetch() -> bool:
    """Whether the host can read a fingerprint now: a CUDA graph capture does not allow it."""
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _fingerprint(tensor: Tensor) -> int | Tensor:
    if (shard := shard_of(tensor)) is not None:
        tensor = shard
    elif is_traceable_wrapper_subclass(tensor):
        return 0
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    tensor = tensor.contiguous()
    if _of_memory is not None and tensor.device.type == "cpu":
        return _of_memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    words = tensor.view(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(words.split(_CHUNK)):
        total = total * 31 + (chunk * _odd_numbers(tensor.device)[: chunk.numel()]).sum() + number
    return total


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    """Return odd numbers without a pattern: steps of a linear congruential generator (Knuth's MMIX), low bit set."""
    steps = torch.arange(_CHUNK, device=device, dtype=torch.int64) * 6364136223846793005 + 1442695040888963407
    return (steps ^ (steps >> 29)) | 1
