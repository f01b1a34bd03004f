"""Bounds checks of lookups in runs with generated inputs, to prevent device-side assertions."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# The positions of the table, of the indices and of the dimension, if any, among the arguments.
_ALONG = (
    {packet: (0, 1, None) for packet in (aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only)}
    | {packet: (0, 2, 1) for packet in (aten.index_select, aten.gather, aten.index_add, aten.index_copy)}
    | {packet: (0, 2, 1) for packet in (aten.index_fill, aten.scatter, aten.scatter_add, aten.scatter_reduce)}
    | {packet: (0, 2, 1) for packet in (aten.index_add_, aten.index_copy_, aten.index_fill_)}
    | {packet: (0, 2, 1) for packet in (aten.scatter_, aten.scatter_add_, aten.scatter_reduce_)}
)
_BY_LISTS = (aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_)


# Frequent functions without lookups, by name.
_WITHOUT = frozenset(
    """__add__ __get__ __mul__ __neg__ __pow__ __rmul__ __sub__ __truediv__ _set_grad_enabled add addmm baddbmm bmm
    cat chunk clone contiguous conv1d conv2d cos detach dim div dropout exp expand flatten float gelu
    is_floating_point layer_norm linear matmul mean mul neg numel permute pow relu reshape rms_norm rsqrt
    scaled_dot_product_attention sigmoid silu sin size softmax split squeeze stack stride sub sum tanh tensor to
    transpose type_as unsqueeze view""".split()
)
_PLAIN_INDICES = (int, slice, type(None), type(...))


class BoundedLookups(TorchFunctionMode):
    """Mode in which an out-of-range lookup raises IndexError on every device. Without it, a GPU reports a device-side
    assertion, after which the process cannot use CUDA. It does not see calls inside TorchScript.

    Functions without lookups run as they are: a mode that sees each operator doubles the time of a forward.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if _is_without_lookups(function, args):
            return function(*args, **(kwargs or {}))
        with _Checked():
            return function(*args, **(kwargs or {}))


def _is_without_lookups(function: Any, args: tuple[Any, ...]) -> bool:
    if isinstance(function, torch._ops.OpOverload):
        return function.overloadpacket not in _ALONG and function.overloadpacket not in _BY_LISTS
    if isinstance(function, torch._ops.OpOverloadPacket):
        return False
    name = getattr(function, "__name__", "")
    if name == "__getitem__":
        given = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(type(each) in _PLAIN_INDICES for each in given)
    return name in _WITHOUT


class _Checked(TorchDispatchMode):
    """Mode that checks the indices of each operator."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet = function.overloadpacket
        if packet in _ALONG:
            table, indices, dimension = _ALONG[packet]
            along = 0 if dimension is None else args[dimension]
            _require(args[indices], 0, args[table].shape[along] if args[table].dim() else 1, function)
        elif packet in _BY_LISTS:
            for indices, size in _indexed(args[0], args[1]):
                _require(indices, -size, size, function)
        return function(*args, **(kwargs or {}))


def bounded_lookups(leaves: Iterable[Any]) -> AbstractContextManager[Any]:
    """Returns ``BoundedLookups`` if a tensor among ``leaves`` is not on the CPU, which checks bounds itself."""
    on_device = any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in leaves)
    return BoundedLookups() if on_device else nullcontext()


def _indexed(table: Tensor, indices: list[Tensor | None]) -> Iterable[tuple[Tensor, int]]:
    """Yields the integer ``indices`` with the sizes that they index. A mask indexes as many dimensions as it has."""
    dimension = 0
    for each in indices:
        if each is not None and each.dtype not in (torch.bool, torch.uint8):
            yield each, table.shape[dimension]
        dimension += 1 if each is None or each.dtype not in (torch.bool, torch.uint8) else each.dim()


def _require(indices: Any, least: int, end: int, function: Any) -> None:
    if isinstance(indices, Tensor) and indices.numel() and not indices.is_meta:
        first, last = (int(each) for each in indices.aminmax())
        if first < least or last >= end:
            raise IndexError(f"{function}: index {last if last >= end else first} is out of range for {end}")
