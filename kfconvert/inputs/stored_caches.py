"""Kinds of key-value caches as JSON values.

The values may be untrusted: classes must be in a list, and an attribute must not hide a method.
"""

from __future__ import annotations

import importlib
import math
import re
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError

from ..json_values import first_fault
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


_Attributes = Annotated[dict[str, Any], Field(max_length=_MOST)]


class _StoredKind(BaseModel, strict=True):
    """A ``CacheKind``: of a static cache, of nested caches, or of layers."""

    cls: Literal["DynamicCache", "EncoderDecoderCache", "StaticKeyValues"] = Field(alias="class")
    attributes: _Attributes = {}
    layers: list[Annotated[tuple[str, _Attributes], Field(strict=False)]] = Field([], max_length=_MOST)
    filled: list[bool] = []
    inner: list[Annotated[tuple[str, _StoredKind], Field(strict=False)]] = []
    static: int = Field(0, ge=0, le=2 * _MOST)


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
    try:
        return _made_kind(_StoredKind.model_validate(stored))
    except ValidationError as error:
        raise UnstorableCache(f"the description of a cache {first_fault(error)}") from error


def _made_kind(stored: _StoredKind) -> CacheKind:
    if stored.cls == NAME:
        if stored.static % 2 == 0:
            raise UnstorableCache("a static cache must have a position, keys and values")
        try:
            return CacheKind(static_key_values(), {}, static=stored.static)
        except ImportError:
            raise UnstorableCache("transformers is not installed") from None
    cls = _class(stored.cls, CACHES)
    attributes = _attributes(cls, stored.attributes)
    if stored.cls == "EncoderDecoderCache":
        if [(name, kind.cls) for name, kind in stored.inner] != [(name, "DynamicCache") for name in INNER]:
            raise UnstorableCache("the nested caches of a cache do not match its class")
        return CacheKind(cls, attributes, inner=tuple((name, _made_kind(each)) for name, each in stored.inner))
    if stored.inner or len(stored.filled) != len(stored.layers):
        raise UnstorableCache("a cache must state which of its layers are filled")
    layers = []
    for name, held in stored.layers:
        layer = _class(name, LAYERS)
        layers.append((layer, _attributes(layer, held)))
        if name == SLIDING and type(held.get("sliding_window")) is not int:
            raise UnstorableCache("a layer with a sliding window must have the length of the window")
    return CacheKind(cls, attributes, tuple(layers), tuple(stored.filled))


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


def _stored_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: _stored(value) for name, value in attributes.items()}


def _attributes(cls: type, stored: dict[str, Any]) -> dict[str, Any]:
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
    if (
        kind == "flags"
        and isinstance(value, list)
        and all(isinstance(each, list) and list(map(type, each)) == [int, bool] for each in value)
    ):
        return dict(value)
    raise UnstorableCache(f"{str(stored)[:50]} is not a valid attribute of a cache")
