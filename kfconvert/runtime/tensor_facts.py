"""What Python code asks of tensors besides shape, dtype and device, such as ``is_contiguous()``: no graph shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .code import code_walk
from .contents import is_of_author


def _layout(tensor: Tensor) -> Any:
    if tensor.is_contiguous():
        return True
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return "channels_last" if channels_last else tensor.stride()


def _strides(tensor: Tensor) -> Any:
    """True where they are those of a new tensor. A tensor is contiguous whatever its strides in sizes of 1 are."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        if stride != expected:
            return tensor.stride()
        expected *= max(size, 1)
    return True


# Name -> what decides the answer, for tensors of the same shape, dtype and device.
_DECIDING: dict[str, Callable[[Tensor], Any]] = {
    "is_contiguous": _layout,
    "stride": _strides,
    "storage_offset": Tensor.storage_offset,
    "is_inference": Tensor.is_inference,
    "requires_grad": lambda tensor: tensor.requires_grad,
    "is_leaf": lambda tensor: tensor.is_leaf,
    "grad": lambda tensor: tensor.is_leaf and tensor.grad is None,
    "grad_fn": lambda tensor: tensor.grad_fn is None,
    # By isinstance() or the like: no operator is called.
    "Parameter": lambda tensor: isinstance(tensor, nn.Parameter),
    "Buffer": lambda tensor: isinstance(tensor, nn.Buffer),
}
# Where the answer is another one each time.
_UNSTEADY = frozenset(("data_ptr", "untyped_storage", "storage", "_version", "is_shared", "is_pinned", "__repr__"))
# By these Python code gets at the elements of a tensor.
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
#: Among the names of ``Asked`` where the code looks at elements: those of attributes may stand in a graph as numbers.
ELEMENTS = "elements"


class Asked(TorchFunctionMode):
    """Within the block, ``names`` collects what the code of a model's author asks of tensors in this thread."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(getattr(function, "__self__", None), "__name__", "")
        if (name in _DECIDING or name in _UNSTEADY) and is_of_author(sys._getframe(1).f_globals.get("__name__")):
            self.names.add(name)
        elif name in _OF_ELEMENTS:
            self.names.add(ELEMENTS)
        elif name == "__repr__":  # which PyTorch's own code asks for: the text that a trace would see is of no tensor
            self.names.add(name)
        return function(*args, **(kwargs or {}))


def asked_of_classes(classes: Iterable[type]) -> frozenset[str]:
    """The classes of tensors of which the code of ``classes`` may ask whether a tensor is one."""
    walk = code_walk(classes, (), ())
    walk.reach()
    return frozenset(("Parameter", "Buffer")) & walk.asked_for


def unsteady(names: Iterable[str]) -> str | None:
    """The first of ``names`` whose answer differs from call to call, None where there is none."""
    return next(iter(sorted(_UNSTEADY.intersection(names))), None)


def facts(names: Iterable[str], values: Iterable[Any]) -> list[Any]:
    """What decides the answers to ``names`` for each tensor among ``values``."""
    asked = [_DECIDING[name] for name in sorted(names) if name in _DECIDING]
    return [[ask(value) for ask in asked] for value in values if isinstance(value, Tensor)]
