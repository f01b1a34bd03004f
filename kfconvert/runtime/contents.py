"""What lists, dicts and plain objects hold, as entries of a Watch: a forward that reads one depends on its contents."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import sys
import threading
import types
from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy
from torch import Tensor, nn

from ..inputs import is_equal
from .random_generators import GENERATORS
from .watch import ITEMS, MISSING, SIZE, TYPE, Entry

# (path of the container in words, entry)
Found = tuple[str, Entry]

# To what depth objects within objects are looked at, and how many in all; what lies beyond is taken as constant.
_DEPTH, _MOST = 20, 50_000
# Larger arrays would take too long to compare at each call.
_MOST_BYTES = 1 << 16
# What every module has in its instance dict.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_OF_LIBRARIES = frozenset(("torch", "numpy", "kfconvert", *sys.stdlib_module_names))
# Among these, classes that hold what others put there.
_HOLDERS = ("collections", "configparser", "fractions", "string", "torch.distributions.", "torch.optim.")


def is_plain_object(value: Any) -> bool:
    """Whether ``value`` is an instance of a Python class of a model's author, with attributes of its own; or of one of
    Python's or torch's that holds what others put there."""
    if isinstance(value, _NAMESPACES):
        return True
    if isinstance(value, (type, nn.Module, Tensor, Enum, types.ModuleType, dict, list, tuple, set, frozenset)):
        return False
    module = type(value).__module__
    return (is_of_author(module) or module.startswith(_HOLDERS)) and isinstance(getattr(value, "__dict__", None), dict)


def is_of_author(module: str | None) -> bool:
    """Whether the Python module of this name belongs neither to Python nor to torch, numpy or this package."""
    return (module or "").partition(".")[0] not in _OF_LIBRARIES


def items(value: Any) -> list[Any]:
    """What a list, tuple, set or dict holds; nothing for others."""
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else []


def plain_objects(values: list[Any]) -> list[Any]:
    """The distinct plain objects among ``values``, in containers there, and in each other's attributes."""
    return [value for value in _reached(values) if is_plain_object(value)]


def generators(values: list[Any]) -> list[Any]:
    """The distinct random generators there."""
    return [value for value in _reached(values) if isinstance(value, GENERATORS)]


def _reached(values: list[Any]) -> list[Any]:
    found: dict[int, Any] = {}
    pending, opened = [(value, 0) for value in values], 0
    while pending and opened < _MOST:
        value, depth = pending.pop()
        if id(value) in found or depth > _DEPTH:
            continue
        found[id(value)] = value
        inner = list(vars(value).values()) if is_plain_object(value) else items(value)
        opened += bool(inner)
        pending += [(each, depth + 1) for each in inner]
    return list(found.values())


def _copied(value: Any) -> Any:
    """What a container holds that a Watch cannot look into, in a form to be compared with; None for other values."""
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), value.detach().flatten().tolist()
    if isinstance(value, (collections.deque, bytearray, array.array)):
        return tuple(value)
    if isinstance(value, contextvars.ContextVar):
        return (value.get(MISSING),)
    if isinstance(value, threading.local):  # what this thread has there
        return tuple(vars(value).items())
    if isinstance(value, numpy.ndarray) and value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
        return value.shape, value.dtype, value.tobytes()
    if not is_of_author(type(value).__module__):
        return None
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return tuple(getattr(value, name, MISSING) for name in slots) if slots else None


def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def first_different(compared: list[tuple[str, Any, Any]]) -> str | None:
    """The name of the first container that does not hold what it held, None where all do."""
    return next((name for name, value, known in compared if not is_equal(_copied(value), known)), None)


class Contents:
    """Collects the entries for what containers hold, each container once.

    ``containers`` has the outermost by their names, ``compared`` those that a Watch cannot look into (sets, deques,
    arrays, objects with slots), each with what it held.
    """

    def __init__(self):
        self._seen: dict[int, Any] = {}
        self.containers: dict[str, Any] = {}
        self.compared: list[tuple[str, Any, Any]] = []

    def numbers_of(self, name: str, tensor: Tensor) -> None:
        """A tensor whose numbers Python code has read."""
        if tensor.numel() * tensor.element_size() <= _MOST_BYTES:
            self.compared.append((name, tensor, _copied(tensor)))

    def of(self, name: str, value: Any, sized: bool = True, depth: int = 0) -> Iterator[Found]:
        """Entries for what ``value``, which goes by ``name``, holds, if it is a container of a kind that may change.

        Args:
            sized: an item that is added to a dict is a change too.
        """
        if depth > _DEPTH or id(value) in self._seen or len(self._seen) > _MOST:
            return
        if isinstance(value, nn.Module):
            self._seen[id(value)] = value
            yield from self._of_module(name, value)
            return
        if isinstance(value, (collections.UserDict, collections.UserList)):
            value = value.data
        if isinstance(value, GENERATORS):  # its state may change between calls; what matters is whether a call draws
            self.containers.setdefault(name, value)
            return
        known = None if isinstance(value, (list, tuple, dict)) else _copied(value)
        if known is not None:
            self.compared.append((name, value, known))
        elif not isinstance(value, (list, tuple, dict)):
            return
        self._seen[id(value)] = value
        self.containers.setdefault(name, value)
        if isinstance(value, list):
            yield name, (value, ITEMS, tuple(value))
        elif isinstance(value, dict):
            if sized:
                yield name, (value, ITEMS, tuple(value))
            for key, item in [*list(value.items()), *getattr(value, "__dict__", {}).items()]:
                yield name, (value if key in value else vars(value), key, item)
        for item in known if isinstance(known, tuple) else items(value):
            yield from self.of(name, item, sized, depth + 1)

    def _of_module(self, name: str, module: nn.Module) -> Iterator[Found]:
        """The entries for a module that only a list or an object holds; modules of the model itself are watched by
        ``ModelState``."""
        for inner in module.modules():
            for store in (inner._parameters, inner._buffers, inner._modules):
                yield name, (store, SIZE, len(store))
                for key, held in store.items():
                    yield name, (store, key, held)
            yield name, (inner, TYPE, type(inner))
            for key, held in list(vars(inner).items()):
                if isinstance(held, dict) and key.startswith("_"):  # hooks of each kind
                    yield name, (held, SIZE, len(held))
                yield name, (inner, key, held)
            yield name, (inner, "forward", vars(inner).get("forward", MISSING))
