"""Comparison of a model's attributes and their contents between calls."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator
from typing import Any

import numpy
from torch import Tensor, nn

from ..accuracy import is_same_tensor
from ..inputs import is_equal
from ..runtime import (
    GENERATORS,
    MISSING,
    OF_CONVERSION,
    OF_EVERY_MODULE,
    as_bytes,
    is_of_author,
    is_plain_object,
    slotted,
    whole_walk,
)

CONTAINERS = (list, dict, set, collections.deque)
_NOT_OWN = OF_EVERY_MODULE | OF_CONVERSION
_DEPTH = 20


class Kept:
    """The attributes of a model's modules, and the containers that its code finds in the globals, with their contents.
    Tensors are not copied: a tensor that was written to since counts as changed."""

    def __init__(self, model: nn.Module):
        own = frozenset(map(id, model.modules()))
        self._values = {
            (path, name): _Frozen(value, own)
            for path, module in model.named_modules()
            for name, value in own_attributes(vars(module)).items()
        }
        self._values |= {("", name): _Frozen(value, own) for name, value in outside(model).items()}
        for path, module in model.named_modules():
            for name, value in _of_classes(type(module)):
                self._values[path, name] = _Frozen(value, own, itself=True)

    def changed(self, later: Kept) -> list[tuple[str, str]]:
        """Returns module path and name of each difference in ``later``; a global has the path of the model itself."""
        return [place for place, known, held in self._pairs(later) if not known.is_same(held)]

    def written_into(self, later: Kept, read: Collection[str]) -> list[tuple[str, str]]:
        """Like ``changed``, but a dict or set that only gained items counts as a cache. Attributes, also of modules,
        count only if they are in ``read``."""
        return [
            place
            for place, known, held in self._pairs(later)
            if any(name is None or name in read for name in known.written(held, place[1].rpartition(".")[2]))
        ]

    def _pairs(self, later: Kept) -> Iterator[tuple[tuple[str, str], _Frozen, _Frozen]]:
        missing = _Frozen(MISSING)
        for place in sorted(self._values.keys() | later._values.keys()):
            yield place, self._values.get(place, missing), later._values.get(place, missing)


def _of_classes(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields names (``Class.attribute``) and values of the class attributes that all modules of ``kind`` share."""
    for base in kind.__mro__:
        if is_of_author(base.__module__):
            for name, value in vars(base).items():
                if not name.startswith("__") and not callable(value):
                    yield f"{base.__name__}.{name}", value


def readers(model: nn.Module, name: str) -> dict[nn.Module, str]:
    """Returns the modules whose code finds ``name`` in the globals."""
    return {module: name for module in model.modules() if name in outside(module)}


def outside(model: nn.Module) -> dict[str, Any]:
    """Returns the containers that the code of ``model`` finds in the globals, by name."""
    return whole_walk(model).containers


class _Frozen:
    """A snapshot of a value and its contents."""

    def __init__(self, value: Any, around: frozenset[int] = frozenset(), depth: int = 0, itself: bool = False):
        """``around``: ids of objects to skip; ``itself``: a different tensor with the same elements counts as a
        different value."""
        self.kind = type(value)
        self.value: Any = None
        self.version: int | None = None
        self.itself = value if itself and isinstance(value, Tensor) else None
        self.holder: Any = None  # the container or object, if its contents were read
        self.inner: dict[Any, _Frozen] = {}
        if isinstance(value, Tensor):
            self.value = value
            self.version = None if value.is_inference() else value._version
        elif isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
            self.value = value
        elif isinstance(value, (set, frozenset)):
            self.value = frozenset(value)
        elif isinstance(value, numpy.ndarray):
            self.value = value.shape, value.tobytes() if not value.dtype.hasobject else None
        elif isinstance(value, GENERATORS):
            self.value = as_bytes(value)
        elif id(value) not in around and depth < _DEPTH and (held := _held(value)) is not None:
            self.holder = value
            around |= {id(value)}
            self.inner = {name: _Frozen(each, around, depth + 1) for name, each in held.items()}

    def is_same(self, later: _Frozen) -> bool:
        """Whether ``later`` has the same contents. Values whose contents were not read are compared by class."""
        inner = self.inner.keys() == later.inner.keys() and all(
            held.is_same(later.inner[name]) for name, held in self.inner.items()
        )
        return inner and self._has_value(later)

    def written(self, later: _Frozen, attribute: str | None) -> Iterator[str | None]:
        """Yields the attributes whose contents differ in ``later``, and None for items. Dicts and sets may gain items.
        ``attribute`` is the attribute of this value."""
        if self.holder is None or self.holder is not later.holder:
            grown = isinstance(self.value, frozenset) and later.kind is self.kind and self.value <= later.value
            if not (grown or self.is_same(later)):
                yield attribute
            return
        missing = _Frozen(MISSING)
        has_attributes = not isinstance(self.holder, (*CONTAINERS, tuple))
        for name in self.inner if isinstance(self.holder, dict) else self.inner | later.inner:
            known, held = self.inner.get(name, missing), later.inner.get(name, missing)
            yield from known.written(held, name if has_attributes else None)

    def _has_value(self, later: _Frozen) -> bool:
        if self.kind is not later.kind:
            return False
        if isinstance(self.value, Tensor):
            written = self.version is not None and self.value._version != self.version
            return not written and self.itself is later.itself and is_same_tensor(self.value, later.value)
        return is_equal(self.value, later.value)


def _held(value: Any) -> dict[Any, Any] | None:
    """Returns the contents of a container, object or module by key, index or name; None for other values."""
    if isinstance(value, dict):
        return dict(dict.items(value))  # methods of a subclass may load something, as in AutoModel
    if isinstance(value, (list, tuple, collections.deque)):
        return dict(enumerate(value))
    if isinstance(value, nn.Module):
        return own_attributes(vars(value)) | value._parameters | value._buffers | value._modules
    slots = slotted(value)
    return {**vars(value), **slots} if is_plain_object(value) else slots or None


def own_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in _NOT_OWN}
