"""What a model's forward writes to its own buffers and attributes in the calls that a conversion makes, put back."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
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
    code_walk,
    configurations,
    generator_state,
    generators,
    is_of_author,
    is_plain_object,
    plain_objects,
    put_back,
)

_NOT_OWN = OF_EVERY_MODULE | {"forward", "kfconvert_info", "kfconvert_refresh"}


class _Snapshot:
    """Buffers and plain attributes of a model: the values of tensors, and what lists, dicts, sets and plain objects
    among the attributes hold. The keys are ids; the objects are kept as well, so that no other object can get their
    ids."""

    def __init__(self, model: nn.Module):
        self.holders: dict[int, tuple[Any, Any]] = {}
        self.tensors: dict[int, tuple[Tensor, Tensor]] = {}
        for module in model.modules():
            self._keep(module._buffers)
            self._keep(vars(module))
        for item in plain_objects([value for module in model.modules() for value in _own(vars(module)).values()]):
            self._keep(vars(item))

    def _keep(self, holder: Any) -> None:
        if id(holder) in self.holders:
            return
        items = _own(holder) if isinstance(holder, dict) else holder.copy()
        self.holders[id(holder)] = holder, items
        for value in items.values() if isinstance(items, dict) else items:
            if is_lazy(value):  # made in the first call
                continue
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta:
                self.tensors[id(value)] = value, value.detach().clone()
            elif isinstance(value, (list, dict, set, collections.deque)):
                self._keep(value)


class Kept:
    """What a model keeps: the attributes of its modules, and the lists, dicts and the like that its code finds in the
    globals, with all that they hold. Tensors are not copied: one that was written to since is a change."""

    def __init__(self, model: nn.Module):
        self._values = {
            (path, name): _Frozen(value)
            for path, module in model.named_modules()
            for name, value in _own(vars(module)).items()
        }
        self._values |= {("", name): _Frozen(value) for name, value in _outside(model).items()}
        for path, module in model.named_modules():
            for name, value in _of_classes(type(module)):
                self._values[path, name] = _Frozen(value, itself=True)

    def changed(self, later: Kept) -> list[tuple[str, str]]:
        """Module path and name of what ``later`` has otherwise; a global has the path of the model itself."""
        paths = self._values.keys() | later._values.keys()
        missing = _Frozen(MISSING)
        return [p for p in sorted(paths) if not self._values.get(p, missing).is_same(later._values.get(p, missing))]


def _of_classes(kind: type) -> Iterator[tuple[str, Any]]:
    """The names (``Class.attribute``) and values of the class attributes that all modules of ``kind`` share."""
    for base in kind.__mro__:
        if is_of_author(base.__module__):
            for name, value in vars(base).items():
                if not name.startswith("__") and not callable(value):
                    yield f"{base.__name__}.{name}", value


def _outside(model: nn.Module) -> dict[str, Any]:
    """The lists, dicts and the like that the code of ``model`` finds in the globals, by name."""
    walk = code_walk([type(each) for each in (*model.modules(), *configurations(model))], (), ())
    walk.reach()
    return walk.contents.containers


class _Frozen:
    """A value as it is now, with what it holds."""

    def __init__(self, value: Any, around: frozenset[int] = frozenset(), itself: bool = False):
        """``itself``: another tensor with the same elements is another value."""
        self.kind = type(value)
        self.value: Any = None
        self.version: int | None = None
        self.itself = value if itself and isinstance(value, Tensor) else None
        self.inner: list[_Frozen] = []
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
        elif id(value) not in around and len(around) < _DEPTH:
            held = _held(value)
            self.value = None if held is None else len(held)
            self.inner = [_Frozen(each, around | {id(value)}) for each in held or ()]

    def is_same(self, later: _Frozen) -> bool:
        """Whether ``later`` holds the same. Values that are not looked into count as the same if their classes are."""
        if self.kind is not later.kind or len(self.inner) != len(later.inner):
            return False
        if isinstance(self.value, Tensor):
            written = self.version is not None and self.value._version != self.version
            return not written and self.itself is later.itself and is_same_tensor(self.value, later.value)
        same = is_equal(self.value, later.value)
        return same and all(one.is_same(other) for one, other in zip(self.inner, later.inner))


_DEPTH = 20


def _held(value: Any) -> list[Any] | None:
    """What a container or a plain object holds, keys included; None for others."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, collections.deque)):
        return list(value)
    if not is_plain_object(value):
        return None
    return [*vars(value), *vars(value).values()]


class OwnState:
    """The state that ``model`` keeps for itself as it was when this was made.

    Some models learn a size, or make a part of themselves, in their first call; ``settled`` is to be called after that.
    What changes again in later calls is a counter, an average or a cache: only that is put back, and what ``keep`` is
    told of, parameters among it. ``written`` has the names of the attributes that were.
    """

    def __init__(self, model: nn.Module):
        self._before = self._after = _Snapshot(model)
        self.written: set[str] = set()
        self._attributes = {id(vars(module)): vars(module) for module in model.modules()}
        outside = list(_outside(model).values())
        self._outside = [(held, list(held)) for held in outside if isinstance(held, (list, collections.deque))]
        attributes = [value for module in model.modules() for value in _own(vars(module)).values()]
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._carried: list[tuple[dict[str, Any], str, Any]] = []
        self._gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        self._generators = [(each, generator_state(each)) for each in generators([*attributes, *outside])]

    def _restore_outside(self) -> None:
        """Remove the tensors that a call has added to a list in the globals, and put back what they have replaced;
        nobody else is expected to add tensors there."""
        for held, before in self._outside:
            known = set(map(id, before))
            added = [item for item in held if isinstance(item, Tensor) and id(item) not in known]
            if added:
                gone = known | set(map(id, added))
                others = [item for item in held if id(item) not in gone]
                held.clear()
                held.extend((*before, *others))

    def keep(self, model: nn.Module, names: Iterable[str], source: nn.Module | None) -> None:
        """What has these dotted names, which calls depend on and change, is to be as it was before the first call.
        Parameters, of which this has no copies, are to be as in ``source``, or as they are now where that is None."""
        for name in names:
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            tensor = module._parameters.get(attribute)
            if tensor is not None:
                kept = tensor if source is None else getattr(source.get_submodule(path), attribute)
                self._tensors.append((tensor, kept.detach().clone()))
            buffer = module._buffers.get(attribute)
            if buffer is not None and id(buffer) in self._before.tensors:
                self._tensors.append(self._before.tensors[id(buffer)])
            for holder in (module._buffers, vars(module)):
                _, before = self._before.holders.get(id(holder), (holder, {}))
                if attribute in holder:
                    self._carried.append((holder, attribute, before.get(attribute, MISSING)))

    def settled(self, model: nn.Module) -> None:
        self._after = _Snapshot(model)

    @torch.no_grad()
    def restore(self) -> None:
        """Give what has changed since the first call the value that it had before that call. What only came with that
        call has no such value: an attribute is removed, and an item of a list or dict gets its value after that call.
        Entries that were added to dicts later are left, as in caches."""
        self._restore_outside()
        for generator, state in self._generators:
            put_back(generator, state)
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for written, kept in self._tensors:
            written.copy_(kept)
        for holder, name, value in self._carried:
            if value is MISSING:
                holder.pop(name, None)
            else:
                holder[name] = value
        for key, (holder, after) in self._after.holders.items():
            _, before = self._before.holders.get(key, (holder, after))
            if isinstance(holder, dict):
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
        for key, (tensor, after) in self._after.tensors.items():
            _, before = self._before.tensors.get(key, (tensor, after))
            if not is_same_tensor(tensor, after) and tensor.shape == before.shape:
                tensor.copy_(before)


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in _NOT_OWN}


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other))
