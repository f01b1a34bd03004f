"""What the modules of a model are made of, to be put back where a change of it was refused half way."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

_STORES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """The parameters, buffers and submodules of ``model`` and of all modules within it, with their classes and other
    attributes, as they are now. It holds all of them but ``model``, until that is gone."""

    def __init__(self, model: nn.Module):
        self._modules = [_Module(module) for module in model.modules()]
        # What lies within a model may hold a snapshot of it: together they would wait for Python's cyclic collector.
        self._gone = weakref.ref(model, _Emptied(self))

    def put_back(self, name: str) -> None:
        """Make all modules what they were, but for their attributes, of which those that go by ``name`` and are gone
        come back."""
        for module in self._modules:
            module.put_back(name)

    def clear(self) -> None:
        self._modules.clear()


class _Emptied:
    """Called when the model of a snapshot is gone."""

    def __init__(self, snapshot: Snapshot):
        self._snapshot = weakref.ref(snapshot)

    def __call__(self, _: weakref.ref[nn.Module]) -> None:
        snapshot = self._snapshot()
        if snapshot is not None:
            snapshot.clear()


class _Module:
    def __init__(self, module: nn.Module):
        self._module, self._kind = weakref.ref(module), type(module)
        # parametrize.remove_parametrizations takes the property out of the class.
        self._of_class = dict(vars(self._kind))
        self._attributes = dict(vars(module))
        self._stores = [(store, dict(store)) for store in (getattr(module, name) for name in _STORES)]
        self._not_saved = module._non_persistent_buffers_set, set(module._non_persistent_buffers_set)

    def put_back(self, name: str) -> None:
        module = self._module()
        if module is None:
            return
        if type(module) is not self._kind:
            module.__class__ = self._kind
        if name in self._of_class and name not in vars(self._kind):
            setattr(self._kind, name, self._of_class[name])
        if name in self._attributes:
            module.__dict__.setdefault(name, self._attributes[name])
        for store, held in self._stores:
            if not _is_same(store, held):  # else other threads may be reading it
                store.clear()
                store.update(held)
        names, held_names = self._not_saved
        names.clear()
        names.update(held_names)


def _is_same(store: dict[str, Any], held: dict[str, Any]) -> bool:
    """Whether both have the very same values under the same names, in the same order."""
    return list(store) == list(held) and all(store[name] is value for name, value in held.items())
