"""Flattens key-value caches of transformers to tensors, rebuilds them, and writes to them as a forward does.

The caches are not registered with pytree, because that would change how torch.export treats the user's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .static_cache import is_static

# The modules of transformers with cache classes. They are imported if a cache exists.
MODULE = "transformers.cache_utils"
CACHES = frozenset(("DynamicCache", "EncoderDecoderCache"))
SLIDING = "DynamicSlidingWindowLayer"
LAYERS = frozenset(("DynamicLayer", SLIDING))
# Nested caches of an EncoderDecoderCache.
INNER = ("self_attention_cache", "cross_attention_cache")
# Attributes derived from the keys and the other attributes of a layer.
_TENSORS = frozenset(("keys", "values"))
_OF_WINDOW = frozenset(("cumulative_length", "_sliding_window_tensor"))
_PLAIN = frozenset((bool, int, float, str, type(None), type, torch.dtype, torch.device))


@dataclass(frozen=True)
class CacheKind:
    """The structure of a cache without its keys and values: class and attributes of the cache and of its layers, and
    the kinds of nested caches.

    ``filled``: whether each layer has keys and values, of shape [batch, heads, length, head size]. These are the
    tensors of the cache, in the order of layers and then of nested caches.
    """

    cls: type
    attributes: dict[str, Any]
    layers: tuple[tuple[type, dict[str, Any]], ...] = ()
    filled: tuple[bool, ...] = ()
    inner: tuple[tuple[str, CacheKind], ...] = ()
    # For a static cache, whose attributes are all tensors.
    static: int = 0

    @property
    def count(self) -> int:
        """Returns the number of tensors."""
        if self.static:
            return self.static
        return 2 * sum(self.filled) + sum(kind.count for _, kind in self.inner)

    def made(self, tensors: Sequence[Any]) -> Any:
        """Creates a cache of this kind from ``tensors``."""
        if self.static:
            return self.cls(tensors)
        cache: Any = object.__new__(self.cls)
        if self.inner:
            vars(cache).update((name, object.__new__(kind.cls)) for name, kind in self.inner)
        self.write(cache, tensors)
        return cache

    def write(self, cache: Any, tensors: Sequence[Any]) -> None:
        """Changes the object ``cache`` to this kind with ``tensors``."""
        if self.static:
            cache.write(tensors)
            return
        held = vars(cache)
        if not self.inner:
            held.setdefault("layers", [])  # the first attribute, as after __init__
        for name, value in self.attributes.items():
            if type(value) is not dict:
                held[name] = value
            elif held.setdefault(name, dict(value)) != value:  # the dict may be shared
                held[name].clear()
                held[name].update(value)
        rest = iter(tensors)
        for name, kind in self.inner:
            kind.write(held[name], [next(rest) for _ in range(kind.count)])
        if self.inner:
            return
        layers = held["layers"]
        layers += [object.__new__(cls) for cls, _ in self.layers[len(layers) :]]
        for layer, (cls, attributes), filled in zip(layers, self.layers, self.filled):
            own = vars(layer)
            own["keys"], own["values"] = (next(rest), next(rest)) if filled else (None, None)
            own.update(attributes)
            if cls.__name__ == SLIDING:
                own["cumulative_length"] = own["keys"].shape[-2] if filled else 0
                window = own.get("_sliding_window_tensor")
                if window is None:
                    window = torch.tensor(attributes["sliding_window"], dtype=torch.long)
                own["_sliding_window_tensor"] = window.to(own["keys"].device) if filled else window


def is_cache(value: Any) -> bool:
    """Whether the class of ``value`` is a known cache class. Its layers may be of unknown classes."""
    of_transformers = type(value).__module__ == MODULE
    return is_static(value) or (of_transformers and type(value).__name__ in CACHES)


def kind_of(cache: Any) -> tuple[CacheKind, list[Any]] | None:
    """Returns the kind and the tensors of a cache. Returns None if its contents are unknown, such as a layer of another
    class, or a layer that has dropped tokens outside its window."""
    if is_static(cache):
        tensors = cache.tensors()
        return CacheKind(type(cache), {}, static=len(tensors)), tensors
    held = vars(cache)
    if type(cache).__name__ == "EncoderDecoderCache":
        found = [kind_of(held[name]) if type(held.get(name)).__name__ == "DynamicCache" else None for name in INNER]
        rest = {name: dict(v) if type(v) is dict else v for name, v in held.items() if name not in INNER}
        if None in found or held[INNER[0]] is held[INNER[1]] or not all(map(_is_plain_or_flags, rest.values())):
            return None
        kinds = tuple((name, kind) for name, (kind, _) in zip(INNER, found))  # type: ignore[misc]  # none is None
        return CacheKind(type(cache), rest, inner=kinds), [t for _, tensors in found for t in tensors]  # type: ignore[misc]
    attributes = {name: value for name, value in held.items() if name != "layers"}
    layers = held["layers"]
    if not all(type(value) in _PLAIN or isinstance(value, type) for value in attributes.values()):
        return None
    if type(layers) is not list or len(set(map(id, layers))) < len(layers):
        return None
    tensors = []
    kinds_of_layers, filled = [], []
    for layer in layers:
        own = vars(layer)
        cls, keys = type(layer), own.get("keys")
        if cls.__module__ != MODULE or cls.__name__ not in LAYERS or (keys is None) != (own.get("values") is None):
            return None
        derived = _TENSORS
        if cls.__name__ == SLIDING:
            if own.get("cumulative_length") != (0 if keys is None else keys.shape[-2]):
                return None
            derived = _TENSORS | _OF_WINDOW
        state = {name: value for name, value in own.items() if name not in derived}
        if not _PLAIN.issuperset(map(type, state.values())):
            return None
        kinds_of_layers.append((cls, state))
        filled.append(keys is not None)
        if keys is not None:
            tensors += (keys, own["values"])
    return CacheKind(type(cache), attributes, tuple(kinds_of_layers), tuple(filled)), tensors


def _is_plain_or_flags(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is dict and {int, bool} >= set(map(type, (*value, *value.values()))))


@dataclass(frozen=True)
class TreeForm:
    """The structure of values as in pytree, with caches flattened as well.

    ``spec`` has a leaf for each cache. ``caches`` has for each of these leaves the kind of a new cache, or the index of
    a cache ``passed`` to the forward. ``written`` has the kinds of passed caches after the forward. The flat values are
    the leaves in order, with all tensors of a new cache, then the tensors of the ``written`` caches.
    """

    spec: pytree.TreeSpec
    caches: dict[int, CacheKind | int]
    written: tuple[CacheKind, ...] = ()

    @property
    def holds_caches(self) -> bool:
        return bool(self.caches or self.written)

    @property
    def count(self) -> int:
        """Returns the number of flat values."""
        new = [kind for kind in self.caches.values() if isinstance(kind, CacheKind)]
        return self.spec.num_leaves - len(self.caches) + sum(kind.count for kind in (*new, *self.written))

    def put_together(self, flat: Sequence[Any], passed: Sequence[Any] = ()) -> Any:
        """Rebuilds the values from ``flat``, and writes to the ``passed`` caches, which keep their positions."""
        if not self.holds_caches:
            return pytree.tree_unflatten(flat, self.spec)
        rest = iter(flat)
        leaves = []
        for index in range(self.spec.num_leaves):
            kind = self.caches.get(index)
            if isinstance(kind, int):
                leaves.append(passed[kind])
            else:
                leaves.append(next(rest) if kind is None else kind.made([next(rest) for _ in range(kind.count)]))
        for cache, kind in zip(passed, self.written):
            kind.write(cache, [next(rest) for _ in range(kind.count)])
        return pytree.tree_unflatten(leaves, self.spec)

    def as_lists(self, flat: Sequence[Any]) -> list[Any]:
        """Rebuilds the items of a list. Items that contain a cache or an object of a registered class become lists of
        their flat values."""
        rest, places = iter(flat), iter(range(self.spec.num_leaves))
        items: list[Any] = []
        for spec in self.spec.children():
            kinds = [self.caches.get(next(places)) for _ in range(spec.num_leaves)]
            counts = [kind.count if isinstance(kind, CacheKind) else 1 for kind in kinds]
            values = [next(rest) for _ in range(sum(counts))]
            items.append(pytree.tree_unflatten(values, spec) if not any(kinds) and _is_builtin(spec) else values)
        return items


def _is_builtin(spec: pytree.TreeSpec) -> bool:
    return spec.is_leaf() or (spec.type in (tuple, list, dict) and all(map(_is_builtin, spec.children())))


class UnknownCache(ValueError):
    """Raised if a cache cannot be flattened. The message has the reason."""


def taken_apart(values: Any, passed: Iterable[Any] = ()) -> tuple[list[Any], TreeForm]:
    """Flattens ``values`` and returns the flat values and their form. An unknown cache stays a leaf.

    Args:
        passed: cache arguments of the call that returned ``values``.

    Raises:
        UnknownCache: a passed cache has an unknown form after the call, or two caches share objects.
    """
    leaves, spec = pytree.tree_flatten(values, is_leaf=is_cache)
    passed = list(passed)
    if not passed and not any(map(is_cache, leaves)):
        return leaves, TreeForm(spec, {})
    places = {id(cache): index for index, cache in enumerate(passed)}
    parts = {id(part) for cache in passed for part in _parts(cache)}
    flat: list[Any] = []
    caches: dict[int, CacheKind | int] = {}
    for index, leaf in enumerate(leaves):
        if id(leaf) in places:
            caches[index] = places[id(leaf)]
            continue
        found = kind_of(leaf) if is_cache(leaf) else None
        if found is None:
            flat.append(leaf)
            continue
        if not parts.isdisjoint(map(id, _parts(leaf))):
            raise UnknownCache("two caches share layers or attributes")
        parts.update(map(id, _parts(leaf)))
        caches[index], tensors = found
        flat += tensors
    written = []
    for cache in passed:
        found = kind_of(cache)
        if found is None:
            raise UnknownCache("it changes a cache argument to an unknown form")
        written.append(found[0])
        flat += found[1]
    return flat, TreeForm(spec, caches, tuple(written))


def _parts(cache: Any) -> list[Any]:
    """The objects that make up a cache."""
    if type(cache).__name__ == "EncoderDecoderCache":
        own = [value for value in vars(cache).values() if type(value) is dict]
        return [cache, *own, *_parts(cache.self_attention_cache), *_parts(cache.cross_attention_cache)]
    return [cache, *cache.layers]


def map_tensors(function: Callable[[Tensor], Any], values: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Applies ``function`` to each tensor in ``values``, also in caches, which are copied."""

    def mapped(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        found = kind_of(value) if is_cache(value) else None
        return value if found is None else found[0].made(list(map(function, found[1])))

    return pytree.tree_map(
        mapped, values, is_leaf=lambda value: is_cache(value) or (is_leaf is not None and is_leaf(value))
    )


def caches_in(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if is_cache(value)]
