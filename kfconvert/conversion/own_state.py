"""Detects and restores what a model's forward writes to the model in the calls of a conversion."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..accuracy import is_same_tensor
from ..inputs import is_equal
from ..runtime import (
    GENERATORS,
    MISSING,
    OF_EVERY_MODULE,
    as_bytes,
    generator_state,
    is_plain_object,
    memory_of,
    put_back,
    slotted,
    without_conversion,
)
from .leaked_tensors import OutsideCaches

# The path of a module and the name of its attribute, buffer or parameter; a global has the path of the model.
Place = tuple[str, str]
# The maximum depth of nested containers and objects.
_DEPTH = 20
_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, torch.Size, nn.Parameter, nn.Module)


class _Kept:
    """A value with a copy of what it holds: ``copy`` of a tensor, array, set or generator, ``inner`` of containers and
    plain objects, by key, index or name."""

    def __init__(self, value: Any):
        self.value = value
        self.copy: Any = None
        self.inner: dict[Any, _Kept] | None = None

    def is_in(self, value: Any, met: set[tuple[int, int]], grown: bool = False) -> bool:
        """Whether ``value`` has the same content. Objects without known contents are compared by class.

        ``grown``: dicts and sets, which may be caches, may have further items.
        """
        if type(value) is not type(self.value):
            return False
        if self.inner is not None:
            if (id(self), id(value)) in met:  # compared already, or part of itself
                return True
            met.add((id(self), id(value)))
            held = _contents(value) or {}
            fits = (
                held.keys() >= self.inner.keys()
                if grown and isinstance(value, dict)
                else held.keys() == self.inner.keys()
            )
            return fits and all(kept.is_in(held[key], met, grown) for key, kept in self.inner.items())
        if isinstance(value, Tensor) and self.copy is not None:
            return is_same_tensor(self.copy, value.detach())
        if isinstance(value, numpy.ndarray):
            return numpy.array_equal(self.copy, value)
        if isinstance(value, GENERATORS):
            return self.copy[1] == as_bytes(value)
        if isinstance(value, set):
            return self.copy == value or (grown and self.copy <= value)
        return is_equal(self.value, value) or not isinstance(value, _PLAIN)

    def put_back(self, done: set[int]) -> None:
        """Restore the content of the value, in place."""
        value, inner = self.value, self.inner or {}
        if id(value) in done:
            return
        done.add(id(value))
        if isinstance(value, Tensor) and self.copy is not None:
            if value.shape == self.copy.shape:
                value.copy_(self.copy)
            else:  # its memory was replaced
                value.data = self.copy.clone()
        elif isinstance(value, numpy.ndarray) and value.shape == self.copy.shape:
            value[...] = self.copy
        elif isinstance(value, GENERATORS):
            put_back(value, self.copy[0])
        elif isinstance(value, set):
            value.clear()
            value.update(self.copy)
        elif isinstance(value, (list, collections.deque)):
            value.clear()
            value.extend(each.value for each in inner.values())
        elif isinstance(value, dict):
            for key in value.keys() - inner.keys():
                del value[key]
            dict.update(value, {key: each.value for key, each in inner.items()})
        elif not isinstance(value, tuple):
            for name, each in inner.items():
                if isinstance(value, nn.Module) and name in value._buffers:
                    value._buffers[name] = each.value
                elif each.value is not MISSING:
                    object.__setattr__(value, name, each.value)
        for each in inner.values():
            each.put_back(done)


def _contents(value: Any) -> dict[Any, Any] | None:
    """The contents of a container, a plain object or a module by key, index or name; None for other values."""
    if isinstance(value, dict):
        return dict(dict.items(value))  # methods of a subclass may load something, as in AutoModel
    if isinstance(value, (list, tuple, collections.deque)):
        return dict(enumerate(value))
    if isinstance(value, nn.Module):
        return own_attributes(vars(value)) | value._buffers
    return {**vars(value), **slotted(value)} if is_plain_object(value) else slotted(value) or None


def own_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module that belong to its author."""
    return {name: value for name, value in without_conversion(attributes).items() if name not in OF_EVERY_MODULE}


class Snapshot:
    """The attributes and buffers of a model's modules, with copies of what they hold."""

    def __init__(self, model: nn.Module):
        self._known = {id(module): _Kept(module) for module in model.modules()}
        # Path, the dict of a module, and its items.
        self.roots: list[tuple[str, dict[str, Any], dict[str, _Kept]]] = [
            (path, store, {name: self.kept(value) for name, value in own_attributes(store).items()})
            for path, module in model.named_modules()
            for store in (vars(module), module._buffers)
        ]

    def kept(self, value: Any, depth: int = 0) -> _Kept:
        if id(value) in self._known:
            return self._known[id(value)]
        found = self._known[id(value)] = _Kept(value)
        if isinstance(value, Tensor):
            if not (is_lazy(value) or isinstance(value, nn.Parameter) or value.is_meta):
                found.copy = value.detach().clone()
        elif isinstance(value, (numpy.ndarray, set)):
            found.copy = value.copy()
        elif isinstance(value, GENERATORS):
            found.copy = generator_state(value), as_bytes(value)
        elif depth < _DEPTH and (held := _contents(value)) is not None:
            found.inner = {key: self.kept(each, depth + 1) for key, each in held.items()}
        return found


class OwnState:
    """The state that ``model`` keeps between calls, recorded at construction.

    Some models infer a size, or create a submodule, in their first call; call ``settled`` after it. Later calls change
    counters, averages and caches: ``restore`` resets only these.

    Args:
        weights: the parameters by name, in memory that calls do not write to.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor] | None = None):
        self._model, self._weights = model, weights or {}
        #: The names of attributes that calls with other values write.
        self.written: set[str] = set()
        #: Attributes that are reset even where a call has left them as the first one did.
        self.carried: set[Place] = set()
        self._caches = OutsideCaches(model)
        self._gradients = [(each, each.grad, list(map(list, _hooks_of(each)))) for each in model.parameters()]
        self._before = Snapshot(model)
        self._record(self._before)

    def settled(self) -> None:
        """Record the state after the first call."""
        self._record(Snapshot(self._model))

    def _record(self, after: Snapshot) -> None:
        model, self._after = self._model, after
        self._outside = {name: self._after.kept(value) for name, value in self._caches.containers.items()}
        stores = ((path, s) for path, m in model.named_modules() for s in (m._parameters, m._modules))
        self._stores = [(path, store, dict(store)) for path, store in stores]
        tensors = (*model.named_parameters(), *model.named_buffers())
        self._versions = [(path, tensor, _version(tensor)) for path, tensor in tensors]
        self._memory = [(p, p.data) for p in model.parameters() if not is_lazy(p)]

    def changed(self) -> set[Place]:
        """Return the places whose content differs from that after the first call."""
        found = {("", name) for name, kept in self._outside.items() if not kept.is_in(kept.value, set(), grown=True)}
        for path, store, items in self._after.roots:
            found |= {(path, name) for name in _different(own_attributes(store), items, grown=True)}
        for path, store, entries in self._stores:
            names = store.keys() | entries.keys()
            found |= {(path, name) for name in names if store.get(name) is not entries.get(name)}
        written = [name for name, tensor, version in self._versions if _version(tensor) != version]
        return found | set(map(place_of, written))

    @torch.no_grad()
    def resettle(self) -> None:
        """Reset everything to its value after the first call. Call it before the conversion moves parameters."""
        for parameter, memory in self._memory:
            if (memory_of(parameter), parameter.shape) != (memory_of(memory), memory.shape):
                parameter.data = memory
        self._restore(self._after, frozenset())

    def release(self) -> None:
        """Release the memory of parameters, which the conversion may move from now on."""
        self._memory = []

    @torch.no_grad()
    def restore(self) -> None:
        """Reset everything that changed since the first call to its value before that call. If the first call created
        it, there is no such value: an attribute is removed, and an item of a dict gets its value after that call.
        Parameters and submodules are those after that call."""
        self._restore(self._before, self.carried)

    def _restore(self, before: Snapshot, carried: set[Place] | frozenset[Place]) -> None:
        self._caches.restore()
        for _, store, entries in self._stores:
            if list(store) != list(entries) or any(store[name] is not entries[name] for name in entries):
                store.clear()
                store.update(entries)
        for parameter, gradient, registered in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
            for hooks, keys in zip(_hooks_of(parameter), registered):
                for key in hooks.keys() - set(keys):
                    del hooks[key]
        for path, _, _ in self._versions:
            known = self._weights.get(path) if place_of(path) in self.carried else None
            if known is not None and known.shape == (parameter := self._model.get_parameter(path)).shape:
                parameter.copy_(known)
        done: set[int] = set()
        earlier = {id(store): items for _, store, items in before.roots}
        for path, store, after in self._after.roots:
            names = {name for place, name in carried if place == path}
            self._restore_items(store, earlier.get(id(store), {}), after, done, names)

    def _restore_items(
        self,
        holder: dict[Any, Any],
        before: dict[Any, _Kept],
        after: dict[Any, _Kept],
        done: set[int],
        carried: set[str] | None = None,
    ) -> None:
        """Restore the changed items of a dict, and those ``carried``. None for ``carried``: a dict among attributes."""
        for name in _different(own_attributes(holder), after) | ((carried or set()) & after.keys()):
            earlier, later, value = before.get(name), after.get(name), holder.get(name, MISSING)
            if later is not None and value is later.value and name not in (carried or ()):  # it was written in place
                target = earlier if earlier is not None and earlier.value is value else later
                if isinstance(value, dict):
                    self._restore_items(value, target.inner or {}, later.inner or {}, done)
                else:
                    target.put_back(done)
            elif (known := earlier or (later if carried is None else None)) is None:
                holder.pop(name, None)
            else:
                holder[name] = known.value
                known.put_back(done)


def _different(held: dict[Any, Any], known: dict[Any, _Kept], grown: bool = False) -> set[Any]:
    """The names of the items that differ."""
    return {
        name
        for name in held.keys() | known.keys()
        if name not in held or name not in known or not known[name].is_in(held[name], set(), grown)
    }


def _hooks_of(parameter: Tensor) -> list[dict[int, Any]]:
    return [parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}]


def _version(tensor: Tensor) -> tuple[Any, ...]:
    if is_lazy(tensor):
        return ()
    version = None if tensor.is_inference() else tensor._version
    return version, memory_of(tensor), tensor.shape, tensor.requires_grad, tensor.is_leaf and tensor.grad is None


def place_of(name: str) -> Place:
    path, _, attribute = name.rpartition(".")
    return path, attribute
