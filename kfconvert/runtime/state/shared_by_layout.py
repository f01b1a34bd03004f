"""Detects in-place writes by Python code to memory that is shared with another tensor depending on the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...graph import only_splits

# Functions that return a view of their argument, or the argument, where its strides allow it, else a copy.
_RESHAPES = frozenset(("reshape", "reshape_as", "flatten", "ravel"))
_TO_MEMORY_FORMAT = frozenset(("to", "float", "double", "half", "bfloat16", "cpu", "cuda"))
_WRITES = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__")
    + ("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__")
)


class SharedByLayout:
    """Follows the calls of torch functions by some code."""

    def __init__(self):
        self._known: dict[int, StorageWeakRef] = {}  # they keep the addresses in use

    def is_written(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Record a call, and return whether it wrote to an argument or result of an earlier call that shares memory
        depending on the layout."""
        if _shares_by_layout(name, args, kwargs, result):
            self._known |= {storage._cdata: StorageWeakRef(storage) for storage in _storages((args[0], result))}
        if not self._known or not (name in _WRITES or "out" in kwargs or (name[-1:] == "_" and name[:1] != "_")):
            return False
        out = kwargs.get("out", args[:1])
        return any(storage._cdata in self._known for storage in _storages(out if isinstance(out, tuple) else (out,)))


def _shares_by_layout(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    if not args or not isinstance(args[0], Tensor) or not isinstance(result, Tensor):
        return False
    if name in _RESHAPES:
        return not only_splits(args[0].shape, result.shape)
    to_format = name in _TO_MEMORY_FORMAT and kwargs.get("memory_format") not in (None, torch.preserve_format)
    return to_format or name == "contiguous"


def _storages(values: Sequence[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, Tensor):
            try:
                yield value.untyped_storage()
            except (NotImplementedError, RuntimeError):  # it has no visible storage, as a sparse tensor
                continue
