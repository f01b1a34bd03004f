"""Groups modules of a model by structure, so that one captured graph serves each group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..region import Read
from ..runtime import HOOK_KINDS, OF_EVERY_MODULE

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
# Attributes that are compared otherwise or have no effect, such as the ``extra_repr`` that torchao assigns.
_OWN = (OF_EVERY_MODULE - {"training"}) | {"extra_repr"}


def groups(modules: Iterable[nn.Module], also: Callable[[nn.Module], Hashable]) -> list[list[nn.Module]]:
    """Return ``modules`` in groups of equal structure and equal ``also`` values, in order.

    Modules are equal in the classes and names of all submodules, in the shapes, dtypes and ties of tensors, and in
    training flags and hooks. All other attributes are equal except integers, which often number the layers (see
    ``integers``). Attributes without plain values must be the same objects.
    """
    found: dict[Hashable, list[nn.Module]] = defaultdict(list)
    for module in modules:
        found[_structure(module), also(module)].append(module)
    return list(found.values())


def integers(module: nn.Module, reads: Collection[Read]) -> dict[tuple[str, str], int]:
    """The integer attributes of all submodules that a trace with ``reads`` depends on, by module path and name."""
    return {
        (path, name): value
        for path, inner in module.named_modules()
        for name, value in vars(inner).items()
        if type(value) is int
        and name not in _OWN
        and not {(type(inner), name), (type(inner), "__dict__")}.isdisjoint(reads)
    }


def is_operator(module: nn.Module) -> bool:
    """Whether ``module`` is a single operator of PyTorch."""
    return type(module).__module__.startswith("torch.nn.modules.") and not any(True for _ in module.children())


def _structure(module: nn.Module) -> Hashable:
    numbers: dict[int, int] = {}
    parts = []
    for path, inner in module.named_modules(remove_duplicate=False):
        place = numbers.setdefault(id(inner), len(numbers))
        own = sorted(((name, v) for name, v in vars(inner).items() if name not in _OWN), key=lambda item: item[0])
        attributes = tuple((name, _value(value)) for name, value in own if type(value) is not int)
        integers = tuple(name for name, value in own if type(value) is int)
        tensors = tuple(
            (name, None if tensor is None else _tensor(tensor, numbers))
            for store in (inner._parameters, inner._buffers)
            for name, tensor in store.items()
        )
        hooks = tuple(id(hook) for kind in HOOK_KINDS for hook in vars(inner)[kind].values())
        parts.append((path, place, type(inner), attributes, integers, tensors, hooks))
    return tuple(parts)


def _tensor(tensor: Tensor, numbers: dict[int, int]) -> Hashable:
    place = numbers.setdefault(id(tensor), len(numbers))
    kind = type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    inner: Iterable[str] = tensor.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(tensor) else ()
    parts = tuple((name, _tensor(getattr(tensor, name), numbers)) for name in inner)
    others = tuple((name, _value(value)) for name, value in vars(tensor).items() if name not in inner)
    return place, kind, parts, others


def _value(value: Any) -> Hashable:
    if isinstance(value, float):
        return float, repr(value)  # repr distinguishes 0.0 and -0.0, and is equal for all NaNs
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_value, value))
    if type(value) is partial:
        return partial, id(value.func), _value(value.args), _value(tuple(value.keywords.items()))
    return id(value)
