"""Weights stacked in one tensor, so that one product reads all of them without a copy.

The parameters keep their identity: :func:`merge` assigns each a block of rows of a new tensor as its ``data``. DLPack
gives each block a separate storage, so that code for the storage of a parameter keeps working: ``torch.save`` and
pickles write it alone, safetensors detects no shared memory, autograd and compilers see no views, and each parameter
has its own version counter.

Only the parameters keep the tensor alive. :func:`whole` looks it up by the address of its first block. Any holder of
the parameters finds it, unless they have moved since (deep copies, ``.half()``, ``load_state_dict(assign=True)``,
``.data = ...``, a replaced parameter).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

# Blocks start at multiples of so many bytes, as PyTorch's CPU allocations do: libraries are slower on unaligned data,
# and sum in another order.
_ALIGNMENT = 64


class _Whole:
    """A tensor whose blocks of rows are weights, valid while one of them is alive."""

    def __init__(self, tensor: Tensor):
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device

    def is_gone(self) -> bool:
        return self._storage.expired()

    def tensor(self) -> Tensor | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(storage, 0, self._shape, (self._shape[1], 1))


# Keyed by the address of each block.
_wholes: dict[int, _Whole] = {}
_lock = threading.Lock()


def whole(weights: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor (sum of rows, columns) whose row blocks are the memory of ``weights`` (rows, columns), in their
    order; None where they are not stacked in this way. Do not write to it."""
    if not all(map(_is_matrix, weights)):
        return None
    found = _wholes.get(weights[0].data_ptr())
    tensor = None if found is None else found.tensor()
    if tensor is None:
        return None
    row = tensor.shape[1] * tensor.element_size()
    start = (weights[0].data_ptr() - tensor.data_ptr()) // row
    rows = [weight.shape[0] for weight in weights]
    if start + sum(rows) > tensor.shape[0]:
        return None
    tensor = tensor.narrow(0, start, sum(rows))
    return tensor if all(map(_is_block, weights, tensor.split(rows))) else None


def _is_block(weight: Tensor, block: Tensor) -> bool:
    return (
        weight.data_ptr() == block.data_ptr()
        and weight.shape == block.shape
        and weight.stride() == block.stride()
        and weight.dtype == block.dtype
        and weight.device == block.device
        and not weight.is_neg()
    )


def merge(weights: Sequence[Tensor]) -> list[Tensor] | None:
    """Make the ``weights`` (rows, columns) blocks of rows of one tensor.

    Returns their previous tensors, an empty list where they are stacked already. The caller keeps these until no kernel
    that a call in another thread launches can still read them. Returns None and changes nothing where a weight is no
    plain parameter, shares its memory (with a tensor, an array, a file or another process), or would be unaligned. The
    same holds where memory is insufficient.
    """
    if whole(weights) is not None:
        return []
    if len({id(weight) for weight in weights}) < len(weights) or not all(map(_may_move, weights)):
        return None
    first = weights[0]
    if any((w.dtype, w.device, w.shape[1]) != (first.dtype, first.device, first.shape[1]) for w in weights):
        return None
    # Tensors created under inference_mode cannot be written outside of it.
    with torch.inference_mode(False), torch.no_grad():
        try:
            tensor = torch.cat([weight.detach() for weight in weights])
        except (torch.OutOfMemoryError, MemoryError):
            return None
        before = [weight.detach() for weight in weights]
        blocks = [torch.from_dlpack(block) for block in tensor.split([weight.shape[0] for weight in weights])]
        exchange(weights, blocks)
    found = _Whole(tensor)
    with _lock:
        for address in [address for address, known in _wholes.items() if known.is_gone()]:
            del _wholes[address]
        _wholes.update((block.data_ptr(), found) for block in blocks)
    return before


def separate(weights: Iterable[Tensor]) -> None:
    """Give separate memory to each of the ``weights`` that is a block of a larger tensor."""
    with torch.inference_mode(False), torch.no_grad():
        for weight in weights:
            if whole([weight]) is not None:
                exchange([weight], [weight.detach().clone()])


def exchange(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give ``weights`` the memory of ``values``, which have equal elements. Other threads, on other streams, may use it
    at once."""
    if values[0].is_cuda:
        torch.cuda.current_stream(values[0].device).synchronize()
    for weight, value in zip(weights, values):
        weight.data = value


def _is_matrix(weight: Tensor) -> bool:
    """Whether ``weight`` is a plain two-dimensional parameter on the host or on a GPU."""
    plain = type(weight) is nn.Parameter and weight.layout is torch.strided and weight.device.type in ("cpu", "cuda")
    return plain and weight.dim() == 2 and weight.numel() > 0


def _may_move(weight: Tensor) -> bool:
    return (
        _is_matrix(weight)
        and weight.is_contiguous()
        and not weight.is_inference()
        and not weight.is_neg()
        and weight.numel() * weight.element_size() % _ALIGNMENT == 0
        and is_alone(weight)
    )


def is_alone(weight: Tensor) -> bool:
    """Whether nothing else refers to the memory of ``weight``, whose reads or writes would miss the change."""
    storage = weight.untyped_storage()
    if not storage.resizable() and whole([weight]) is None:  # owned by NumPy, a file, another library or process
        return False
    if weight.device.type == "cpu" and storage.is_shared():
        return False
    del storage
    fresh = torch.empty(1, device=weight.device)
    return _references(weight) == _references(fresh)


def _references(tensor: Tensor) -> tuple[int, int]:
    """The reference counts of a tensor's storage and of its Python object."""
    storage: Any = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
