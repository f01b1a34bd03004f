"""The tensor properties besides shape, dtype and device that Python code reads: no graph records them."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, _tensor, nn, overrides
from torch.overrides import TorchFunctionMode
from torch.utils import weak

from ...graph import only_splits
from .authors import is_of_author
from .code import CodeWalk
from .references import Holdings
from .shared_by_layout import SharedByLayout


def _layout(tensor: Tensor) -> Any:
    if tensor.is_contiguous():
        return True
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return "channels_last" if channels_last else tensor.stride()


def memory_format_of(image: Tensor) -> bool | str:
    """True where it is contiguous; "channels last" where operators treat it and their results as such, as c10's
    ``suggest_memory_format`` decides: a tensor with gaps may be one; else False."""
    if image.is_contiguous():
        return True
    if image.dim() not in (4, 5):
        return False
    least = 0
    for dimension in (1, *range(image.dim() - 1, 1, -1), 0):
        size, stride = image.shape[dimension], image.stride(dimension)
        is_ambiguous = least == image.stride(1) if dimension == 0 else stride == 0 == least
        if size == 0 or stride < least or is_ambiguous:
            return False
        least = stride * size
    return "channels last"


def strides_of(tensor: Tensor) -> Any:
    """True where they equal a new tensor's. A tensor is contiguous regardless of its strides in sizes of 1."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        if stride != expected:
            return tensor.stride()
        expected *= max(size, 1)
    return True


# Name -> the property that decides the result, for tensors of the same shape, dtype and device.
_DECIDING: dict[str, Callable[[Tensor], Any]] = {
    "is_contiguous": _layout,
    "stride": strides_of,
    "storage_offset": Tensor.storage_offset,
    "is_inference": Tensor.is_inference,
    "requires_grad": lambda tensor: tensor.requires_grad,
    "is_leaf": lambda tensor: tensor.is_leaf,
    "grad": lambda tensor: tensor.is_leaf and tensor.grad is None,
    "grad_fn": lambda tensor: tensor.grad_fn is None,
    "dim_order": Tensor.stride,
    "is_neg": Tensor.is_neg,
    "is_conj": Tensor.is_conj,
    "_is_view": Tensor._is_view,
    "_base": Tensor._is_view,
    # For isinstance() and the like: no operator is called.
    "Parameter": lambda tensor: isinstance(tensor, nn.Parameter),
    "Buffer": lambda tensor: isinstance(tensor, nn.Buffer),
}
# Properties that follow from shape, dtype and device, which the guard checks.
_OF_KIND = frozenset((
    "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "__iter__", "dtype", "device",
    "layout", "type", "get_device", "element_size", "itemsize", "nbytes", "is_floating_point", "is_complex",
    "is_signed", "is_cpu", "is_cuda", "is_xpu", "is_mps", "is_mtia", "is_maia", "is_ipu", "is_xla", "is_hpu",
    "is_vulkan", "is_ort", "is_meta", "is_mkldnn", "is_quantized", "is_sparse", "is_sparse_csr", "is_nested",
    "is_distributed", "is_same_size", "names", "has_names", "result_type", "can_cast", "__class__", "sparse_dim",
    "dense_dim",
))  # fmt: skip
# Files with Python methods of tensors and with weak-key dicts: they act on behalf of their caller.
_OF_METHODS = (_tensor.__file__, overrides.__file__, weak.__file__, Mapping.get.__code__.co_filename)
# Functions by which Python code reads the elements of a tensor.
_OF_ELEMENTS = frozenset(
    (
        "item",
        "tolist",
        "numpy",
        "__array__",
        "__dlpack__",
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
    )
    + ("__contains__", "__format__", "equal", "allclose", "is_nonzero")
)
#: Among the names of ``Asked`` where the code reads elements: a graph may contain elements of attributes as numbers.
ELEMENTS = "elements"
#: Among the names of ``Asked`` where the code reads the memory layout of elements, fails depending on it, or writes
#: where it decides the reach of the write.
LAYOUT = "layout of inner values"
_OF_LAYOUT = frozenset(("view", "view_as", "as_strided", "view_as_complex"))
#: Stands for all names where the model cannot run under a mode.
UNKNOWN = "all that there is"


class Asked(TorchFunctionMode):
    """Context manager that collects the properties that the code of a model's author reads of tensors in this thread.

    ``names`` has all of them; ``within`` has, by module, the properties read while that module ran.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.names: set[str] = set()
        self.within: dict[nn.Module, set[str]] = defaultdict(set)
        self._model = model
        self._running: list[nn.Module] = []
        self._shared = SharedByLayout()

    def note(self, name: str) -> None:
        """Add ``name`` to the names of the model and of the modules that run now."""
        self.names.add(name)
        for module in self._running:
            self.within[module].add(name)

    def __enter__(self):
        self._hooks = ExitStack()
        for module in self._model.modules():
            before = module.register_forward_pre_hook(lambda each, _: self._running.append(each), prepend=True)
            after = module.register_forward_hook(lambda *_: (self._running.pop(), None)[1], always_call=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._hooks.close()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, asker = getattr(function, "__name__", ""), _asker(sys._getframe(1))
        is_getter = name == "__get__"
        if name in ("__get__", "__set__"):
            name = getattr(getattr(function, "__self__", None), "__name__", "")
        by_layout = name in _OF_LAYOUT and is_of_author(asker)
        try:
            result = function(*args, **(kwargs or {}))
        except Exception:  # the code may catch it
            if by_layout:
                self.note(LAYOUT)
            raise
        if by_layout and not (name in ("view", "view_as") and only_splits(args[0].shape, result.shape)):
            self.note(LAYOUT)
        if self._shared.is_written(name, args, kwargs or {}, result):
            self.note(LAYOUT)
        if name in _OF_ELEMENTS:
            self.note(ELEMENTS)
        elif name == "__repr__":  # PyTorch calls it; in a trace the text would differ
            self.note(name)
        elif is_of_author(asker) and (name in _DECIDING or (name not in _OF_KIND and _is_answer(result, is_getter))):
            self.note(name)
        return result


def _asker(frame: FrameType | None) -> str | None:
    """The name of the Python module that reads the property."""
    while frame is not None and frame.f_code.co_filename in _OF_METHODS:
        frame = frame.f_back
    return None if frame is None else frame.f_globals.get("__name__")


def _is_answer(result: Any, is_getter: bool) -> bool:
    """Whether a function has returned a Python value about its tensors, instead of computing with them."""
    return is_getter if result is None else not isinstance(result, (Tensor, tuple, list, dict))


def named_by_code(model: nn.Module) -> set[str]:
    """The tensor classes that the code of ``model`` may test with ``isinstance``, and the names by which it may detect
    a compiler."""
    walk = CodeWalk(map(type, model.modules()), Holdings(model).functions, None)
    return {"Parameter", "Buffer"} & walk.asked_for | walk.of_compilers


def unsteady(names: Iterable[str]) -> str | None:
    """The first of ``names`` whose value no check covers, None where there is none."""
    return next(iter(sorted(set(names) - _DECIDING.keys() - {ELEMENTS, LAYOUT})), None)


def are_decided(names: Iterable[str]) -> bool:
    """Whether ``facts`` covers any of the names."""
    return not _DECIDING.keys().isdisjoint(names)


def facts(names: Iterable[str], values: Iterable[Any]) -> list[Any]:
    """The values that decide the results for ``names``, for each tensor among ``values``."""
    asked = [_DECIDING[name] for name in sorted(names) if name in _DECIDING]
    return [[ask(value) for ask in asked] for value in values if isinstance(value, Tensor)]
