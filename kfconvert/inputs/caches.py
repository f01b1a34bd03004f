"""Flattens key-value caches of transformers to tensors, rebuilds them, and writes to them as a forward does.

The caches are not registered with pytree, because that would change how torch.export treats the user's caches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .static_cache import STATES, is_static, is_static_kind, set_tensor, tensors_of

# The modules of transformers with cache classes. They are imported if a cache exists.
MODULE = "transformers.cache_utils"
CACHES = frozenset(("DynamicCache", "EncoderDecoderCache"))
# The classes of layers whose updates create new keys and values, and those with states that a forward writes in place.
GROWING = frozenset(("DynamicLayer", "DynamicSlidingWindowLayer"))
RECURRENT = frozenset(
    (
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
)
LAYERS = GROWING | RECURRENT
# The tokens that a layer has dropped outside of its window, as a tensor of shape [batch, tokens, 0].
_DROPPED = ("dropped",)
# Nested caches of an EncoderDecoderCache.
INNER = ("self_attention_cache", "cross_attention_cache")
# Attributes derived from the tensors and the other attributes, or without influence on a forward.
_OF_WINDOW = frozenset(("cumulative_length", "_sliding_window_tensor"))
_APART = frozenset(("layers", "position", "_is_user_defined"))
_PLAIN = frozenset((bool, int, float, str, type(None), type, torch.dtype, torch.device))


@dataclass(frozen=True)
class CachePlace:
    """The place of a tensor in the caches among flat values: the number of the cache, the nested cache, the index of
    the layer, and the name of the tensor in the layer."""

    cache: int
    nested: str
    layer: int
    name: tuple[Any, ...]

    def of(self, layer: int) -> CachePlace:
        """Returns the same place in another layer."""
        return replace(self, layer=layer)


@dataclass(frozen=True)
class CacheKind:
    """The structure of a cache without its tensors: class and attributes of the cache and of its layers, and the kinds
    of nested caches.

    Each of the ``layers`` has its class, its attributes, and the names of its tensors: those of ``tensors_of``, and
    ``_DROPPED`` for a layer with a window. The tensors of a cache are in the order of layers and then of nested caches.
    Those of a static cache begin with its position.
    """

    cls: type
    attributes: dict[str, Any]
    layers: tuple[tuple[type, dict[str, Any], tuple[tuple[Any, ...], ...]], ...] = ()
    inner: tuple[tuple[str, CacheKind], ...] = ()

    @property
    def is_static(self) -> bool:
        """Whether a cache of this kind, or a nested one, is a static cache."""
        return is_static_kind(self) or any(kind.is_static for _, kind in self.inner)

    @property
    def count(self) -> int:
        """Returns the number of tensors."""
        own = sum(len(names) for *_, names in self.layers) + is_static_kind(self)
        return own + sum(kind.count for _, kind in self.inner)

    def places(self, number: int, nested: str = "") -> list[CachePlace | None]:
        """Returns the place of each tensor in a cache with this ``number``; None for the position."""
        if self.inner:
            return [place for name, kind in self.inner for place in kind.places(number, name)]
        found: list[CachePlace | None] = [None] * is_static_kind(self)
        for layer, (*_, names) in enumerate(self.layers):
            found += [CachePlace(number, nested, layer, name) for name in names]
        return found

    def made(self, tensors: Sequence[Any]) -> Any:
        """Creates a cache of this kind from ``tensors``, which a forward with this cache does not change."""
        cache: Any = object.__new__(self.cls)
        vars(cache).update((name, object.__new__(kind.cls)) for name, kind in self.inner)
        self.write(cache, tensors)
        keep_apart(cache)
        return cache

    def write(self, cache: Any, tensors: Sequence[Any]) -> None:
        """Changes the object ``cache`` to this kind with ``tensors``."""
        held, rest = vars(cache), iter(tensors)
        if not self.inner:
            held.setdefault("layers", [])  # the first attribute, as after __init__
        for name, value in self.attributes.items():
            if type(value) is not dict:
                held[name] = value
            elif held.setdefault(name, dict(value)) != value:  # the dict may be shared
                held[name].clear()
                held[name].update(value)
        for name, kind in self.inner:
            kind.write(held[name], [next(rest) for _ in range(kind.count)])
        if self.inner:
            return
        if is_static_kind(self):
            held["position"] = next(rest)
        layers = held["layers"]
        layers += [object.__new__(cls) for cls, *_ in self.layers[len(layers) :]]
        for layer, (_, attributes, names) in zip(layers, self.layers):
            own = vars(layer)
            for name, value in attributes.items():
                own[name] = dict(value) if type(value) is dict else value
            for place in names:
                tensor = next(rest)
                if place == _DROPPED:
                    own["cumulative_length"] = own["keys"].shape[-2] + tensor.shape[1]
                else:
                    set_tensor(layer, place, tensor)
            if "position" in held:
                own["position"] = held["position"]
            if "sliding_window" in own:
                keys = own["keys"]
                if keys is None:
                    own["cumulative_length"] = 0
                window = own.get("_sliding_window_tensor")
                if window is None:
                    window = torch.tensor(attributes["sliding_window"], dtype=torch.long)
                own["_sliding_window_tensor"] = window if keys is None else window.to(keys.device)


def is_cache(value: Any) -> bool:
    """Whether the class of ``value`` is a known cache class. Its layers may be of unknown classes."""
    of_transformers = type(value).__module__ == MODULE
    return is_static(value) or (of_transformers and type(value).__name__ in CACHES)


def kind_of(cache: Any) -> tuple[CacheKind, list[Any]] | None:
    """Returns the kind and the tensors of a cache. Returns None if its contents are unknown, such as a layer of another
    class."""
    held = vars(cache)
    if type(cache).__name__ == "EncoderDecoderCache":
        nested = [held.get(name) for name in INNER]
        found = [kind_of(each) if is_static(each) or type(each).__name__ == "DynamicCache" else None for each in nested]
        names = _APART.union(INNER)
        rest = {name: dict(v) if type(v) is dict else v for name, v in held.items() if name not in names}
        if None in found or held[INNER[0]] is held[INNER[1]] or not all(map(_is_plain_or_flags, rest.values())):
            return None
        kinds = tuple((name, kind) for name, (kind, _) in zip(INNER, found))  # type: ignore[misc]  # none is None
        return CacheKind(type(cache), rest, inner=kinds), [t for _, tensors in found for t in tensors]  # type: ignore[misc]
    attributes = {name: value for name, value in held.items() if name not in _APART}
    layers = held["layers"]
    if not all(type(value) in _PLAIN or isinstance(value, type) for value in attributes.values()):
        return None
    if type(layers) is not list or len(set(map(id, layers))) < len(layers):
        return None
    tensors = [held["position"]] if is_static(cache) else []
    kinds_of_layers = []
    for layer in layers:
        if not is_static(cache) and not _is_layer(layer, LAYERS):
            return None
        own, named = vars(layer), dict(tensors_of(layer))
        keys = own.get("keys")
        if "cumulative_length" in own and keys is None and own["cumulative_length"]:
            return None
        if "cumulative_length" in own and keys is not None:
            # An empty tensor has the number of tokens that were dropped, which may vary, in its shape.
            dropped = own["cumulative_length"] - keys.shape[-2]
            named[_DROPPED] = keys.new_zeros((keys.shape[0], dropped, 0))
        state = {}
        for name, value in own.items():
            if name in _OF_WINDOW or name in _APART or (name,) in named:
                continue
            state[name] = {k: v for k, v in value.items() if (name, k) not in named} if type(value) is dict else value
        if not all(map(_is_plain_or_flags, state.values())):
            return None
        kinds_of_layers.append((type(layer), state, tuple(named)))
        tensors += named.values()
    return CacheKind(type(cache), attributes, tuple(kinds_of_layers)), tensors


def _is_layer(layer: Any, names: frozenset[str]) -> bool:
    return type(layer).__module__ == MODULE and type(layer).__name__ in names


def keep_apart(cache: Any) -> None:
    """Replaces tensors that a forward writes in place by copies."""
    for layer in layers_of(cache):
        for name, tensor in tensors_of(layer):
            if name[0] in STATES:
                set_tensor(layer, name, tensor.clone())


def layers_of(cache: Any) -> list[Any]:
    """Returns the layers of a cache, and of nested caches."""
    held = vars(cache)
    return held["layers"] if "layers" in held else [layer for name in INNER for layer in layers_of(held[name])]


def twin(cache: Any) -> Any:
    """Returns a cache with the same tensors and with separate layers."""
    other = copy.copy(cache)
    held = vars(other)
    held.update((name, twin(value)) for name, value in held.items() if name in INNER)
    held.update((name, dict(value)) for name, value in held.items() if type(value) is dict)
    if "layers" in held:
        held["layers"] = [copy.copy(layer) for layer in cache.layers]
        for layer in held["layers"]:
            vars(layer).update({name: dict(value) for name, value in vars(layer).items() if type(value) is dict})
    return other


def cache_of_tokens(cache: Any) -> Any:
    """Returns the cache of the decoder's tokens: ``cache``, or the inner one of an ``EncoderDecoderCache``."""
    return getattr(cache, INNER[0], cache)


def with_cache_of_tokens(cache: Any, inner: Any) -> Any:
    """Returns the ``EncoderDecoderCache`` with ``inner`` as the cache of the decoder's tokens."""
    other = twin(cache)
    setattr(other, INNER[0], inner)
    return other


def is_resident(cache: Any) -> bool:
    """Whether ``cache`` is a ``DynamicCache``, or an ``EncoderDecoderCache`` of two, on the device with layers of known
    classes, which may have dropped tokens outside their windows."""
    name = type(cache).__name__
    if type(cache).__module__ != MODULE or name not in CACHES:
        return False
    if name != "DynamicCache":
        return all(is_resident(vars(cache)[inner]) for inner in INNER)
    plain = all(_is_layer(each, LAYERS) and not getattr(each, "record_past", False) for each in cache.layers)
    return plain and not cache.offloading


def _is_plain_or_flags(value: Any) -> bool:
    return type(value) in _PLAIN or (
        type(value) is dict and all(type(each) in _PLAIN for each in (*value, *value.values()))
    )


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

    def places(self) -> list[CachePlace | None]:
        """Returns the place of each flat value in its cache; None for other values."""
        found: list[CachePlace | None] = []
        for index in range(self.spec.num_leaves):
            kind = self.caches.get(index)
            if not isinstance(kind, int):
                found += [None] if kind is None else kind.places(index)
        for number, kind in enumerate(self.written, self.spec.num_leaves):
            found += kind.places(number)
        return found

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
