"""Values as JSON: numbers, texts, dtypes, devices, containers, classes, and dataclasses of a list.

A reader evaluates nothing: it makes only the kinds that it lists, and looks classes up by name among known ones.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import torch

from . import static_cache
from .caches import CACHES, LAYERS, MODULE, CacheKind
from .records import ClassName, class_name, record_named

_PLAIN = (bool, int, str, type(None))
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_CONTAINERS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "tuple": tuple, "list": list, "dict": dict, "set": set, "frozenset": frozenset
}  # fmt: skip


class Unstorable(ValueError):
    """Raised if a value cannot be stored, or a stored value is invalid. The message has one line."""


class Writer:
    """Converts values to JSON values for a ``Reader``: ``(1, torch.float16)`` becomes ``{"tuple": [1, {"torch":
    "float16"}]}``."""

    # The dataclasses that may be stored. Fields that start with "_" are not stored.
    records: tuple[type, ...] = (CacheKind,)

    def stored(self, value: Any) -> Any:
        """Returns ``value`` as JSON values. Raises Unstorable."""
        if type(value) in _PLAIN:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, _OF_TORCH):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, (tuple, list)):  # fx has subclasses of these
            return {"tuple" if isinstance(value, tuple) else "list": list(map(self.stored, value))}
        if type(value) is dict:
            return {"dict": [[self.stored(key), self.stored(item)] for key, item in value.items()]}
        if isinstance(value, (set, frozenset)):
            return {type(value).__name__: sorted(map(self.stored, value), key=json.dumps)}
        if isinstance(value, type):
            return {"class": list(class_name(value))}
        if isinstance(value, self.records):
            return {type(value).__name__: [self.stored(getattr(value, name)) for name in _fields(type(value))]}
        raise Unstorable(f"a {type(value).__name__} cannot be stored")


class Reader:
    """Rebuilds the values of a ``Writer``.

    Args:
        classes: classes by name, besides those of caches and of named outputs.
    """

    records = Writer.records

    def __init__(self, classes: Mapping[ClassName, type] = MappingProxyType({})):
        self._classes = classes
        self._makers: dict[str, Callable[[Any], Any]] = {
            "float": float, "device": torch.device, "torch": _of_torch, "class": self._class
        }  # fmt: skip
        self._makers |= {name: self._maker(kind) for name, kind in _CONTAINERS.items()}
        self._makers |= {kind.__name__: self._record_maker(kind) for kind in self.records}

    def made(self, stored: Any) -> Any:
        """Rebuilds the value of ``stored``. Raises Unstorable, or any other error for invalid values."""
        if not isinstance(stored, dict):
            return stored
        ((kind, value),) = stored.items()
        if kind not in self._makers:
            raise Unstorable(f"{str(kind)[:50]!r} is not a kind of value")
        return self._makers[kind](value)

    def _maker(self, kind: Callable[[Iterable[Any]], Any]) -> Callable[[Any], Any]:
        if kind is dict:
            return lambda items: {self.made(key): self.made(value) for key, value in items}
        return lambda items: kind(map(self.made, items))

    def _record_maker(self, kind: type) -> Callable[[Any], Any]:
        return lambda items: kind(**dict(zip(_fields(kind), map(self.made, items), strict=True)))

    def _class(self, name: list[str]) -> type:
        module, kind = name
        if module == MODULE and kind in CACHES | LAYERS:
            return getattr(importlib.import_module(MODULE), kind)
        if module == static_cache.__name__:
            return static_cache.static_classes()[kind]
        builtin = {class_name(each): each for each in (tuple, list, dict)}
        found = self._classes.get((module, kind)) or builtin.get((module, kind)) or record_named(name)
        if found is None:
            raise Unstorable(f"the model has no {str(kind)[:100]}")
        return found


def _fields(kind: Any) -> list[str]:
    return [each.name for each in fields(kind) if not each.name.startswith("_")]


def _of_torch(name: str) -> Any:
    found = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(found, _OF_TORCH):
        raise Unstorable(f"{name[:50]!r} is not a dtype, layout or memory format")
    return found
