"""Kinds of key-value caches as JSON values.

The values may be untrusted: classes must be in a list, and an attribute must not hide a method.
"""

from __future__ import annotations

import importlib
import math
import re
from typing import Any, TypeGuard

import torch

from .caches import CACHES, INNER, LAYERS, MODULE, SLIDING, CacheKind
from .static_cache import NAME, static_key_values

# Classes of caches, of their layers, and of their attributes.
_CLASSES = CACHES | LAYERS
_PLAIN = (bool, int, float, str, type(None))
#: The device names that may be stored.
DEVICE = re.compile(r"(cpu|cuda)(:[0-9]{1,3})?")
_MOST = 10_000  # layers, and attributes of a layer


class UnstorableCache(ValueError):
    """Raised if a kind of cache cannot be stored, or a stored value is not a kind. The message has the reason."""


def stored_kind(kind: CacheKind) -> dict[str, Any]:
    """Returns ``kind`` as JSON values. Raises UnstorableCache."""
    if kind.static:
        return {"class": NAME, "static": kind.static}
    layers = [[_stored_class(cls), _stored_attributes(attributes)] for cls, attributes in kind.layers]
    inner = [[name, stored_kind(each)] for name, each in kind.inner]
    told = {"class": _stored_class(kind.cls), "attributes": _stored_attributes(kind.attributes)}
    return told | ({"inner": inner} if inner else {"layers": layers, "filled": list(kind.filled)})


def made_kind(stored: Any) -> CacheKind:
    """Rebuilds the kind from the result of ``stored_kind``. Raises UnstorableCache."""
    if not isinstance(stored, dict):
        raise UnstorableCache("the description of a cache is not a dict")
    if stored.get("class") == NAME:
        count = stored.get("static")
        if type(count) is not int or not 0 < count <= 2 * _MOST or count % 2 == 0:
            raise UnstorableCache("a static cache must have a position, keys and values")
        return CacheKind(_static_class(), {}, static=count)
    cls = _class(stored.get("class"), CACHES)
    attributes = _attributes(cls, stored.get("attributes"))
    if "inner" in stored:
        inner = stored["inner"]
        if cls.__name__ != "EncoderDecoderCache" or not _is_list_of_pairs(inner):
            raise UnstorableCache("a nested cache must have a name and a kind")
        kinds = tuple((name, made_kind(each)) for name, each in inner)
        if tuple(name for name, _ in kinds) != INNER or not all(_is_growing(kind) for _, kind in kinds):
            raise UnstorableCache("the nested caches of a cache do not match its class")
        return CacheKind(cls, attributes, inner=kinds)
    layers, filled = stored.get("layers"), stored.get("filled")
    if cls.__name__ != "DynamicCache" or not _is_list_of_pairs(layers):
        raise UnstorableCache("a layer of a cache must have a class and attributes")
    if not isinstance(filled, list) or len(filled) != len(layers) or not {bool} >= set(map(type, filled)):
        raise UnstorableCache("a cache must state which of its layers are filled")
    found = []
    for name, held in layers:
        layer = _class(name, LAYERS)
        found.append((layer, _attributes(layer, held)))
        if layer.__name__ == SLIDING and type(found[-1][1].get("sliding_window")) is not int:
            raise UnstorableCache("a layer with a sliding window must have the length of the window")
    return CacheKind(cls, attributes, tuple(found), tuple(filled))


def _is_growing(kind: CacheKind) -> bool:
    return not kind.static and not kind.inner


def _is_list_of_pairs(value: Any) -> TypeGuard[list[list[Any]]]:
    return isinstance(value, list) and len(value) <= _MOST and all(isinstance(e, list) and len(e) == 2 for e in value)


def _stored_class(cls: type) -> str:
    if cls.__module__ != MODULE or cls.__name__ not in _CLASSES:
        raise UnstorableCache(f"a cache has a layer or attribute of type {cls.__name__}")
    return cls.__name__


def _class(name: Any, among: frozenset[str]) -> type:
    if not isinstance(name, str) or name not in among:
        raise UnstorableCache(f"{str(name)[:50]!r} is not a cache class")
    try:
        return getattr(importlib.import_module(MODULE), name)
    except (ImportError, AttributeError):
        raise UnstorableCache(f"the installed transformers has no {name}") from None


def _static_class() -> type:
    try:
        return static_key_values()
    except ImportError:
        raise UnstorableCache("transformers is not installed") from None


def _stored_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: _stored(value) for name, value in attributes.items()}


def _attributes(cls: type, stored: Any) -> dict[str, Any]:
    if not isinstance(stored, dict) or len(stored) > _MOST:
        raise UnstorableCache("the attributes of a cache must be a dict")
    for name in stored:
        if not name.isidentifier() or name.startswith("__") or callable(getattr(cls, name, None)):
            raise UnstorableCache(f"{name[:50]!r} is not an attribute of {cls.__name__}")
    return {name: _made(value) for name, value in stored.items()}


def _stored(value: Any) -> Any:
    if type(value) in _PLAIN and not (type(value) is float and not math.isfinite(value)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device) and DEVICE.fullmatch(str(value)):
        return {"device": str(value)}
    if isinstance(value, type):
        return {"class": _stored_class(value)}
    if type(value) is dict and {int} >= set(map(type, value)) and {bool} >= set(map(type, value.values())):
        return {"flags": [[index, flag] for index, flag in value.items()]}
    raise UnstorableCache(f"a cache has an attribute of type {type(value).__name__}")


def _made(stored: Any) -> Any:
    if type(stored) in _PLAIN:
        return stored
    ((kind, value),) = stored.items() if isinstance(stored, dict) and len(stored) == 1 else ((None, None),)
    if kind == "dtype" and isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype):
        return getattr(torch, value)
    if kind == "device" and isinstance(value, str) and DEVICE.fullmatch(value):
        return torch.device(value)
    if kind == "class":
        return _class(value, _CLASSES)
    if kind == "flags" and _is_list_of_pairs(value) and all(list(map(type, each)) == [int, bool] for each in value):
        return dict(value)
    raise UnstorableCache(f"{str(stored)[:50]} is not a valid attribute of a cache")
