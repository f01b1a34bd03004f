"""The objects that a model holds outside its module tree: configurations, functions, and unregistered modules."""

from __future__ import annotations

import argparse
import collections
import functools
import types
from typing import Any, TypeGuard

from torch import Tensor, nn

from .authors import is_of_author
from .watch import MISSING

# The maximum number of containers and objects that are visited.
_MOST = 50_000
# The instance dict keys of every module.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


class OfConversion:
    """Base class of values that a conversion adds to the instance dict of a model, and that can be removed again."""


OF_CONVERSION = frozenset(
    ("forward", "kfconvert_info", "kfconvert_refresh", "__getstate__", "_replicate_for_data_parallel")
)


def without_conversion(attributes: dict[str, Any]) -> dict[str, Any]:
    """The instance dict of a module without what a conversion added."""
    return {k: v for k, v in attributes.items() if k not in OF_CONVERSION and not isinstance(v, OfConversion)}


class Holdings:
    """The objects that ``model`` holds in attributes, in containers there, and in attributes of plain objects, as long
    as nothing changes.

    ``outside``: the distinct unregistered modules, such as those of a larger model around it; ``configurations``: the
    distinct plain objects, such as a ``config``; ``functions``: the callables except modules.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        own = dict.fromkeys(model.modules())
        tops = [value for value in reached(_attributes(own)) if isinstance(value, nn.Module)]
        self.outside = [each for each in dict.fromkeys(m for top in tops for m in top.modules()) if each not in own]
        found = reached(_attributes([*own, *self.outside]))
        self.configurations = [value for value in found if is_plain_object(value)]
        self.functions = [value for value in found if callable(value) and not isinstance(value, nn.Module)]


def configurations(model: nn.Module) -> list[Any]:
    return Holdings(model).configurations


def _attributes(modules: Any) -> list[Any]:
    # Only generate() reads the generation_config, and only repr() the extra_repr that torchao assigns; no forward does.
    left_out = OF_EVERY_MODULE | OF_CONVERSION | {"generation_config", "extra_repr"}
    return [value for module in modules for name, value in vars(module).items() if name not in left_out]


def reached(values: list[Any]) -> list[Any]:
    """The distinct values among ``values``, in containers there, in attributes of plain objects, and in the bound
    objects of functions."""
    found: dict[int, Any] = {}
    pending, visited = list(values), 0
    while pending and visited < _MOST:
        value = pending.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        inner = _held_by(value)
        visited += bool(inner)
        pending += inner
    return list(found.values())


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if is_plain_object(value):
        return [*vars(value).values(), *slotted(value).values()]
    return items(value) or list(slotted(value).values())


def items(value: Any) -> list[Any]:
    """The values in a list, tuple, set, deque or dict; an empty list for other types."""
    if isinstance(value, dict):
        return list(dict.values(value))  # a subclass may override the method
    return list(value) if isinstance(value, (list, tuple, set, frozenset, collections.deque)) else []


def is_plain_object(value: Any) -> bool:
    """Whether ``value`` is a namespace, or an instance with attributes of a Python class by a model's author."""
    if isinstance(value, _NAMESPACES):
        return True
    if isinstance(value, (type, nn.Module, Tensor, types.ModuleType, dict, list, tuple, set, frozenset)):
        return False
    return is_of_author(type(value).__module__) and _has_attributes(value)


def is_config_dict(value: Any) -> TypeGuard[dict[Any, Any]]:
    """Whether ``value`` is a dict with attributes, of an author's class, such as a configuration of diffusers."""
    return isinstance(value, dict) and is_of_author(type(value).__module__) and _has_attributes(value)


def settings_of(value: dict[Any, Any]) -> dict[Any, Any]:
    """The items of a dict; of a configuration, those without metadata, which ``save_config`` of diffusers writes."""
    found = dict(dict.items(value))
    return {key: item for key, item in found.items() if str(key)[:1] != "_"} if is_config_dict(value) else found


def _has_attributes(value: Any) -> bool:
    """Whether an object has an attribute dict, without the class's attribute lookup, which may raise any error."""
    try:
        return isinstance(object.__getattribute__(value, "__dict__"), dict)
    except AttributeError:
        return False


def slotted(value: Any) -> dict[str, Any]:
    """The slot values by name of an object of an author's class; MISSING for empty slots."""
    if not is_of_author(type(value).__module__):
        return {}
    return {name: getattr(value, name, MISSING) for kind in type(value).__mro__ for name in _slots(kind)}


def _slots(kind: type) -> list[str]:
    found = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    private = kind.__name__.lstrip("_")
    names = tuple(name for name in names if name not in ("__dict__", "__weakref__"))
    return [f"_{private}{name}" if name.startswith("__") and not name.endswith("__") else name for name in names]
