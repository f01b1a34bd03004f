"""Restores buffers and attributes that a model's forward writes in the calls of a conversion."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..accuracy import is_same_tensor
from ..inputs import is_equal
from ..runtime import (
    MISSING,
    generator_state,
    generators,
    is_plain_object,
    put_back,
    reached,
    slotted,
)
from .attribute_state import CONTAINERS, outside, own_attributes
from .leaked_tensors import OutsideCaches, remove_stand_ins


class _Snapshot:
    """A snapshot of a model's buffers and plain attributes: values of tensors, and contents of the lists, dicts, sets
    and plain objects among the attributes. The keys are ids; references to the objects keep these ids valid."""

    def __init__(self, model: nn.Module):
        self.holders: dict[int, tuple[Any, Any]] = {}
        self.tensors: dict[int, tuple[Tensor, Tensor]] = {}
        for module in model.modules():
            self._keep(module._buffers)
            self._keep(vars(module))
        own = set(model.modules())
        self.slotted: dict[int, tuple[Any, dict[str, Any]]] = {}
        for item in reached([value for module in model.modules() for value in own_attributes(vars(module)).values()]):
            if is_plain_object(item):
                self._keep(vars(item))
            if slots := slotted(item):
                self.slotted[id(item)] = item, slots
                self._copy(slots.values())
            if isinstance(item, nn.Module) and item not in own:  # a module that only a container references
                for module in item.modules():
                    self._keep(module._buffers)
                    self._keep(vars(module))

    def _keep(self, holder: Any) -> None:
        if id(holder) in self.holders:
            return
        items = own_attributes(holder) if isinstance(holder, dict) else holder.copy()
        self.holders[id(holder)] = holder, items
        self._copy(items.values() if isinstance(items, dict) else items)

    def put_back(self, value: Any) -> None:
        """Restore the contents of ``value``, a container, object or module that already existed."""
        for item in reached([value]):
            places = [item, vars(item)] if is_plain_object(item) else [item]
            for module in item.modules() if isinstance(item, nn.Module) else ():
                places += [vars(module), module._buffers, *module._buffers.values()]
            for place in places:
                self._put_back(place)

    def _put_back(self, place: Any) -> None:
        holder, items = self.holders.get(id(place), (None, {}))
        if isinstance(holder, dict):
            for name in own_attributes(holder).keys() - items.keys():
                del holder[name]
            holder.update(items)
        elif holder is not None:
            holder.clear()
            holder.update(items) if isinstance(holder, set) else holder.extend(items)
        for name, value in self.slotted.get(id(place), (None, {}))[1].items():
            _set_slot(place, name, value)
        for tensor, kept in [self.tensors[id(place)]] if id(place) in self.tensors else []:
            _fill(tensor, kept)

    def _copy(self, values: Iterable[Any]) -> None:
        for value in values:
            if is_lazy(value):  # initialized in the first call
                continue
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta:
                self.tensors[id(value)] = value, value.detach().clone()
            elif isinstance(value, CONTAINERS):
                self._keep(value)


class OwnState:
    """A snapshot of the state that ``model`` keeps between calls, taken at construction.

    Some models infer a size, or create a submodule, in their first call; call ``settled`` after it. Later calls change
    counters, averages and caches: ``restore`` resets only these, and the names passed to ``keep``, which may be
    parameters. ``written`` has the names of the attributes that were reset.
    """

    def __init__(self, model: nn.Module):
        self._before = self._after = _Snapshot(model)
        self._stores = _stores(model)
        self.written: set[str] = set()
        self._attributes = {id(vars(module)): vars(module) for module in model.modules()}
        self._caches = OutsideCaches(model)
        held = list(outside(model).values())
        self._outside = [(each, list(each)) for each in held if isinstance(each, (list, collections.deque))]
        attributes = [value for module in model.modules() for value in own_attributes(vars(module)).values()]
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._carried: list[tuple[dict[str, Any], str, Any]] = []
        self._containers: list[Any] = []
        self._gradients = [(p, p.grad, [set(hooks) for hooks in _hooks(p)]) for p in model.parameters()]
        self._generators = [(each, generator_state(each)) for each in generators([*attributes, *held])]

    def _restore_outside(self) -> None:
        """Remove the tensors that a call added to a list in the globals, and restore the tensors that it replaced; only
        calls of the conversion should add tensors there."""
        for held, before in self._outside:
            known = set(map(id, before))
            added = [item for item in held if isinstance(item, Tensor) and id(item) not in known]
            if added:
                gone = known | set(map(id, added))
                others = [item for item in held if id(item) not in gone]
                held.clear()
                held.extend((*before, *others))

    def keep(self, model: nn.Module, names: Iterable[str], weights: Mapping[str, Tensor]) -> None:
        """Reset these dotted names, which calls read and change, to their values before the first call. Parameters,
        which have no copy here, get their values from ``weights``."""
        for name in names:
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            tensor = module._parameters.get(attribute)
            if tensor is not None and name in weights:
                self._tensors.append((tensor, weights[name].detach().clone()))
            buffer = module._buffers.get(attribute)
            if buffer is not None and id(buffer) in self._before.tensors:
                self._tensors.append(self._before.tensors[id(buffer)])
            if attribute in vars(module):
                self._containers.append(vars(module)[attribute])
            for holder in (module._buffers, vars(module)):
                _, before = self._before.holders.get(id(holder), (holder, {}))
                if attribute in holder:
                    self._carried.append((holder, attribute, before.get(attribute, MISSING)))

    def keep_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Reset the parameters of these names to ``weights``."""
        parameters = dict(model.named_parameters())
        self._tensors += [(parameters[name], kept.detach().clone()) for name, kept in weights.items()]

    def settled(self, model: nn.Module) -> None:
        self._after, self._stores = _Snapshot(model), _stores(model)

    @torch.no_grad()
    def restore(self) -> None:
        """Reset everything that changed since the first call to its value before that call. If the first call created
        it, there is no such value: an attribute is removed, and an item of a list or dict gets its value after that
        call. Entries added to dicts later, as in caches, remain unless they contain FakeTensors of a trace. Parameters
        and submodules are those after that call."""
        self._restore_outside()
        self._caches.remove_stand_ins()
        for store, entries in self._stores:
            if not _same_entries(store, entries):
                self.written |= {str(name) for name in store.keys() ^ entries.keys()}
                store.clear()
                store.update(entries)
        for generator, state in self._generators:
            put_back(generator, state)
        for parameter, gradient, known in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
            for hooks, keys in zip(_hooks(parameter), known):
                for key in hooks.keys() - keys:
                    del hooks[key]
        for written, kept in self._tensors:
            if written.shape == kept.shape:
                written.copy_(kept)
            else:  # it has other memory now
                written.data = kept.clone()
        for holder, name, value in self._carried:
            if value is MISSING:
                holder.pop(name, None)
            else:
                holder[name] = value
        for container in self._containers:
            self._before.put_back(container)
        for key, (holder, after) in self._after.holders.items():
            _, before = self._before.holders.get(key, (holder, after))
            if isinstance(holder, dict):
                remove_stand_ins(holder, after)
                for name, value in (after | before).items():
                    if is_equal(holder.get(name), after.get(name)):
                        continue
                    self.written.add(str(name))
                    if name in before or holder is not self._attributes.get(key):
                        holder[name] = value
                    else:
                        holder.pop(name, None)
            elif isinstance(holder, (list, collections.deque)) and not _same(holder, after):
                holder.clear()
                holder.extend(before)
            elif isinstance(holder, set) and holder != after:
                holder.clear()
                holder |= before
        for key, (item, after) in self._after.slotted.items():
            _, before = self._before.slotted.get(key, (item, after))
            for name, value in after.items():
                if not is_equal(getattr(item, name, MISSING), value):
                    _set_slot(item, name, before.get(name, value))
        for key, (tensor, after) in self._after.tensors.items():
            _, before = self._before.tensors.get(key, (tensor, after))
            if not is_same_tensor(tensor, after):
                _fill(tensor, before)


def _hooks(parameter: Tensor) -> list[dict[int, Any]]:
    """Returns the hooks of a parameter's gradient, by kind."""
    return [parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}]


def _stores(model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the dicts of the modules' parameters and submodules, each with a copy of its contents."""
    stores: list[dict[str, Any]] = [s for module in model.modules() for s in (module._parameters, module._modules)]
    return [(store, dict(store)) for store in stores]


def _same_entries(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(one) == list(other) and all(one[name] is other[name] for name in one)


def _fill(tensor: Tensor, kept: Tensor) -> None:
    if not is_same_tensor(tensor, kept) and tensor.shape == kept.shape:
        tensor.copy_(kept)


def _set_slot(item: Any, name: str, value: Any) -> None:
    if value is not MISSING:
        setattr(item, name, value)
    elif hasattr(item, name):
        delattr(item, name)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other))
