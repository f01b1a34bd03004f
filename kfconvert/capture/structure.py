"""Groups modules of a model by structure, so that one captured graph serves each group."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..runtime import OF_EVERY_MODULE

_PLAIN = (bool, float, str, bytes, type(None), torch.dtype, torch.device)


_OWN = OF_EVERY_MODULE - {"training"}


def groups(modules: Iterable[nn.Module], also: Callable[[nn.Module], Hashable]) -> list[list[nn.Module]]:
    """Return ``modules`` in groups of equal structure and equal ``also`` values, in order.

    Modules are equal in the classes and names of all submodules, in the shapes, dtypes and ties of tensors, and in
    training flags and hooks. All other attributes are equal except integers, which often number the layers (see
    ``unread``). Attributes without plain values must be the same objects.
    """
    found: dict[Hashable, list[nn.Module]] = defaultdict(list)
    for module in modules:
        found[_structure(module), also(module)].append(module)
    return list(found.values())


def by_integers(group: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """The modules of one group, divided by their integer attributes."""
    found: dict[Hashable, list[nn.Module]] = defaultdict(list)
    for module in group:
        found[tuple(integers(module).items())].append(module)
    return list(found.values())


@contextmanager
def unread(group: Iterable[nn.Module], note: Callable[[str], None]) -> Iterator[None]:
    """Context manager that forbids the use of integer attributes that differ between modules of ``group``.

    Args:
        group: modules of equal structure.
        note: receives the name of an attribute that is used.
    """
    replaced: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
    known = [integers(module) for module in group]
    for path, name in {key for own in known for key in own}:
        if len({own.get((path, name)) for own in known}) == 1:
            continue
        for module in group:
            holder = vars(module.get_submodule(path))
            replaced.setdefault((id(holder), name), (holder, name, holder[name]))
    try:
        for holder, name, _ in replaced.values():
            holder[name] = _Unread(name, note)
        yield
    finally:
        for holder, name, value in replaced.values():
            holder[name] = value


class _Unread:
    """A placeholder for a number; raises on any use except passing it on."""

    def __init__(self, name: str, note: Callable[[str], None]):
        self.__dict__.update(name=name, note=note)

    @property  # type: ignore[misc]  # the attribute of object is assignable
    def __class__(self) -> type:
        """Called by ``isinstance``, which would find that this is no number, so it counts as a use."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") == "abc":  # for abstract classes, Python calls it
            frame = frame.f_back
        asking = "" if frame is None else frame.f_globals.get("__name__", "")
        return _Unread if asking.partition(".")[0] in ("torch", "kfconvert") else self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        self.__dict__["note"](self.__dict__["name"])
        raise RuntimeError(f"the forward uses {self.__dict__['name']}, in which modules of one structure differ")


def integers(module: nn.Module) -> dict[tuple[str, str], int]:
    """The integer attributes of all submodules, by module path and name."""
    return {
        (path, name): value
        for path, inner in module.named_modules()
        for name, value in vars(inner).items()
        if type(value) is int and name not in _OWN
    }


def contents(value: Any) -> Iterable[Any]:
    """The values in a list, a set, a dict or a plain Python object, which modules may share; empty for other types."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, set)):
        return value
    if isinstance(value, (Tensor, nn.Module, type)) or type(value).__module__.startswith("torch"):
        return ()
    try:
        return object.__getattribute__(value, "__dict__").values()
    except AttributeError:
        return ()


def inside(value: Any) -> Hashable:
    """A key that is equal for values with equal ``contents``."""
    return tuple(map(_element, contents(value)))


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
        hooks = tuple(id(hook) for kind in _hook_dicts(inner) for hook in kind.values())
        parts.append((path, place, type(inner), attributes, integers, tensors, hooks))
    return tuple(parts)


def _hook_dicts(module: nn.Module) -> tuple[dict, ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _tensor(tensor: Tensor, numbers: dict[int, int]) -> Hashable:
    place = numbers.setdefault(id(tensor), len(numbers))
    kind = type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    return place, kind, tuple((name, id(value)) for name, value in vars(tensor).items())


def _value(value: Any) -> Hashable:
    if isinstance(value, float):
        return float, repr(value)  # repr distinguishes 0.0 and -0.0, and is equal for all NaNs
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_element(item) for item in value)
    return id(value)


def _element(item: Any) -> Hashable:
    return (int, item) if type(item) is int else _value(item)


def _refuse_everything() -> None:
    names = (
        "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs eq ne lt le "
        "gt ge bool int float index hash str repr format getattr getitem contains len iter and or xor lshift rshift "
        "rand ror rxor rlshift rrshift divmod rdivmod invert round trunc floor ceil complex matmul rmatmul call"
    )
    for name in names.split():
        setattr(_Unread, f"__{name}__", _Unread._refuse)


_refuse_everything()
