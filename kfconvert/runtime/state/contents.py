"""The contents of lists, dicts and plain objects as entries of a Watch, for forwards that read them."""

from __future__ import annotations

import argparse
import collections
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Collection, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ...inputs import is_equal
from ...process import stood_over
from ...region import Read
from .derived import Derived
from .fingerprint import fingerprints
from .random_generators import GENERATORS
from .watch import DICT, ITEMS, MISSING, SIZE, TYPE, Attributes, Entry

# (description of the path to the container, entry)
Found = tuple[str, Entry]

# The maximum depth of watched nested containers.
_DEPTH = 4
# The maximum number of containers and objects that are visited.
_MOST = 50_000
# Comparing larger arrays in each call would take too long.
_MOST_BYTES = 1 << 16
# Comparing tensors of so few bytes is faster than checking whether they were written.
_FEW_BYTES = 1 << 10
# The instance dict keys of every module.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_TREE = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))
_HELD = (dict, collections.OrderedDict, set, list, tuple)


class OfConversion:
    """Base class of values that a conversion adds to the instance dict of a model, and that can be removed again."""


OF_CONVERSION = frozenset(
    ("forward", "kfconvert_info", "kfconvert_refresh", "__getstate__", "_replicate_for_data_parallel")
)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
# The methods that read entries of a dict.
_READING = frozenset((
    "__getattribute__", "__getattr__", "__getitem__", "__missing__", "__contains__", "__iter__", "__len__", "__eq__",
    "get", "keys", "values", "items",
))  # fmt: skip
# pytest inserts its own calls into assertions.
_OF_LIBRARIES = frozenset(("torch", "numpy", "kfconvert", "pytest", "_pytest", "pluggy", *sys.stdlib_module_names))


def is_plain_object(value: Any) -> bool:
    """Whether ``value`` is a namespace, or an instance with attributes of a Python class by a model's author."""
    if isinstance(value, _NAMESPACES):
        return True
    if isinstance(value, (type, nn.Module, Tensor, types.ModuleType, dict, list, tuple, set, frozenset)):
        return False
    return is_class_of_author(type(value)) and instance_dict(value) is not None


def is_config_dict(value: Any) -> bool:
    """Whether ``value`` is a dict with attributes, of an author's class that reads entries like a dict, such as a
    configuration of diffusers. Only reads count, as for plain objects."""
    kind = type(value)
    if not (isinstance(value, dict) and is_class_of_author(kind)) or instance_dict(value) is None:
        return False
    held = (vars(base) for base in kind.__mro__ if is_class_of_author(base))
    return all(stood_over(own[name], MISSING) is MISSING for own in held for name in _READING & own.keys())


def instance_dict(value: Any) -> dict[str, Any] | None:
    """The attribute dict of an object, None where it has none. The class's attribute lookup, which may raise any error,
    is not used."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def is_of_author(module: str | None) -> bool:
    """Whether the Python module of this name belongs neither to Python nor to torch, numpy or this package."""
    root = (module or "").partition(".")[0]
    return root not in _OF_LIBRARIES or _hides_one_of_python(root)


def is_class_of_author(kind: type) -> bool:
    """Whether a class is by a model's author. A class that Python's own functions create may name their module."""
    if is_of_author(kind.__module__):
        return True
    is_written_in_python = bool(kind.__flags__ & _HEAP_TYPE) and isinstance(vars(kind).get("__module__"), str)
    return is_written_in_python and kind.__module__ in ("types", "builtins") and not _is_found(kind)


def _is_found(kind: type) -> bool:
    return getattr(sys.modules[kind.__module__], kind.__name__, None) is kind


@functools.cache
def is_of_project(module: str | None) -> bool:
    """Whether the Python module of this name is the user's own: an author's module outside of installed libraries."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return is_of_author(module) and not any(folder in file for folder in ("site-packages", "dist-packages"))


@functools.cache
def _hides_one_of_python(root: str) -> bool:
    """Whether an author's module shadows a standard library module."""
    file = getattr(sys.modules.get(root), "__file__", None)
    if root not in sys.stdlib_module_names or not isinstance(file, str):
        return False
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    inside = any(os.path.realpath(file).startswith(os.path.realpath(folder) + os.sep) for folder in folders)
    return not inside or "site-packages" in file


def items(value: Any) -> list[Any]:
    """The values in a list, tuple, set, deque or dict; an empty list for other types."""
    if isinstance(value, dict):
        return list(dict.values(value))  # a subclass may override the method
    return list(value) if isinstance(value, (list, tuple, set, frozenset, collections.deque)) else []


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of ``module`` other than parameters, buffers, submodules and empty containers."""
    found = vars(module)
    return {name: value for name, value in found.items() if name not in _TREE and (type(value) not in _HELD or value)}


def plain_objects(values: list[Any]) -> list[Any]:
    """The distinct plain objects among ``values``, in containers there, and in each other's attributes."""
    return [value for value in reached(values) if is_plain_object(value)]


def generators(values: list[Any]) -> list[Any]:
    """The distinct random generators among ``values`` and in their contents."""
    return [value for value in reached(values) if isinstance(value, GENERATORS)]


def lies_in(model: nn.Module, module: nn.Module) -> bool:
    """Whether ``model`` is ``module`` or one of its submodules."""
    return any(each is model for each in module.modules())


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


def _copied(value: Any) -> Any:
    """A comparable form of a container that a Watch does not cover; None for other values."""
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, (collections.deque, bytearray)):
        return tuple(value)
    if isinstance(value, numpy.ndarray) and value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
        return value.shape, value.dtype, value.tobytes()
    return tuple(slotted(value).values()) or None


def slotted(value: Any) -> dict[str, Any]:
    """The slot values by name of an object of an author's class; MISSING for empty slots."""
    if not is_class_of_author(type(value)):
        return {}
    return {name: getattr(value, name, MISSING) for kind in type(value).__mro__ for name in _slots(kind)}


def _slots(kind: type) -> list[str]:
    found = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    private = kind.__name__.lstrip("_")
    names = tuple(name for name in names if name not in ("__dict__", "__weakref__"))
    return [f"_{private}{name}" if name.startswith("__") and not name.endswith("__") else name for name in names]


class _Numbers:
    """The elements of a tensor at construction. Small host tensors, and tensors without an address, are compared in
    each call. Other tensors are compared where a detectable write has occurred, or ``closely``."""

    def __init__(self, tensor: Tensor):
        self._kind = tensor.shape, tensor.dtype
        self._fingerprint = fingerprints([tensor])
        few = tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= _FEW_BYTES
        self._compared = None if few or tensor.layout is not torch.strided else Derived()

    def are_in(self, tensor: Tensor, closely: bool) -> bool:
        compared = {} if self._compared is None else self._compared.values([tensor])
        if not compared or closely:
            same = (tensor.shape, tensor.dtype) == self._kind and fingerprints([tensor]) == self._fingerprint
            compared["same"] = same
        return compared["same"]


def first_different(compared: list[tuple[str, Any, Any]], closely: bool = False) -> str | None:
    """The name of the first container or tensor whose content has changed, None where there is none.

    Args:
        closely: also compare tensors without a detectable write.
    """
    for name, value, known in compared:
        if not (known.are_in(value, closely) if type(known) is _Numbers else is_equal(_copied(value), known)):
            return name
    return None


class Contents:
    """Collects the entries for the contents of containers, each container once, to a depth of ``_DEPTH``.

    ``compared`` has the previous contents of tensors and of containers that a Watch does not cover (sets, deques,
    arrays, objects with slots).

    Args:
        model: attributes that a conversion adds are ignored in modules that contain this model.
        reads: the reads of a trace: only these are watched in configurations that are dicts. None for all.
    """

    def __init__(self, model: nn.Module | None = None, reads: Collection[Read] | None = None):
        self._model = model
        names = None if reads is None else sorted(read for read in reads if isinstance(read, str))
        self._names_read = names if names is not None and "__dict__" not in names else None
        self._seen: dict[int, Any] = {}
        self.compared: list[tuple[str, Any, Any]] = []

    def of(self, name: str, value: Any, depth: int = 0) -> Iterator[Found]:
        """Return entries for the contents of ``value``, called ``name``, if it is a mutable container."""
        if id(value) in self._seen or depth > _DEPTH:
            return
        if isinstance(value, nn.Module):
            yield from self._of_module(name, value, depth)
        elif isinstance(value, Tensor):
            self._seen[id(value)] = value
            if not value.is_meta:
                self.compared.append((name, value, _Numbers(value)))
        elif self._names_read is not None and is_config_dict(value):
            yield from self._of_config_dict(name, value, self._names_read, depth)
        elif isinstance(value, (list, tuple, dict)):
            self._seen[id(value)] = value
            if isinstance(value, list):
                yield name, (value, ITEMS, tuple(value))
            elif isinstance(value, dict):
                yield name, (value, ITEMS, tuple(dict.__iter__(value)))
                for key, item in list(dict.items(value)):
                    yield name, (value, key, item)
            for item in items(value):
                yield from self.of(name, item, depth + 1)
        elif not isinstance(value, type) and (known := _copied(value)) is not None:
            self._seen[id(value)] = value
            self.compared.append((name, value, known))

    def _of_config_dict(self, name: str, value: Any, read: list[str], depth: int) -> Iterator[Found]:
        """Return entries for the items and attributes with these names, present or missing in ``value``."""
        self._seen[id(value)] = value
        yield name, (value, DICT, None)
        for key in read:
            for holder, held in ((value, value), (Attributes(value), vars(value))):
                found = dict.get(held, key, MISSING)
                yield name, (holder, key, found)
                yield from self.of(f"{name}.{key}", found, depth=depth + 1)

    def _of_module(self, name: str, module: nn.Module, depth: int) -> Iterator[Found]:
        """Return entries for a module of a list or an object only; ``ModelState`` watches the model's modules."""
        around = self._model is not None and lies_in(self._model, module)
        left_out = OF_CONVERSION if around else frozenset[str]()
        for inner in module.modules():
            if id(inner) in self._seen:
                continue
            self._seen[id(inner)] = inner
            for store in (inner._parameters, inner._buffers, inner._modules):
                yield name, (store, SIZE, len(store))
                for key, held in store.items():
                    yield name, (store, key, held)
                    if key not in vars(inner):
                        yield name, (inner, key, MISSING)
            yield name, (inner, TYPE, type(inner))
            yield name, (inner, DICT, None)
            for key, held in list(vars(inner).items()):
                if key in left_out:
                    continue
                if isinstance(held, dict) and key.startswith("_"):  # dicts of hooks
                    yield name, (held, SIZE, len(held))
                yield name, (inner, key, held)
                if key not in OF_EVERY_MODULE and not isinstance(held, Tensor):
                    yield from self.of(f"{name}.{key}", held, depth=depth + 1)
            if not around:
                yield name, (inner, "forward", vars(inner).get("forward", MISSING))
                yield name, (inner, SIZE, len(vars(inner)))
