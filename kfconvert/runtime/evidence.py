"""What a trace of a model depends on, as one text: where it is the same, in whichever process, a trace gives the same.

It is made of the very things that ``ModelState`` watches from a conversion on, each told in words that mean the same in
every process: code by its instructions, values by what they are, what holds them by the names that the watch has for
it, and libraries by their versions too. A model that depends on something that cannot be told so has no evidence.
"""

from __future__ import annotations

import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import logging
import pathlib
import platform
import re
import sys
import threading
import types
import typing
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import Field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..inputs import class_name
from ..region import Read
from ..version import __version__
from .code_state import Codes
from .contents import is_config_dict, is_of_project, is_plain_object, slotted
from .fingerprint import fingerprints
from .guarded import guarded_forward
from .hooks import global_hook, has_hooks
from .model_state import ModelState
from .onlookers import default_device, onlooker
from .watch import Mark

# Attributes by which torch.compile knows its own, whether it has run in this process or not.
_OF_DYNAMO = ("_torchdynamo", "___needs_generation_tag")
# Of these it matters only that they are there.
_STATELESS: tuple[type, ...] = (
    logging.Logger, Field, type(threading.Lock()), type(threading.RLock()),
    types.EllipsisType, types.NotImplementedType, type(typing.Any), type(typing.Literal),
    type(typing.Union), contextvars.ContextVar,
)  # fmt: skip
_STATELESS_BY_NAME = frozenset((
    ("dataclasses", "_DataclassParams"), ("enum", "property"), ("torch._dynamo.eval_frame", "DisableContext"),
))  # fmt: skip
_BY_TEXT: tuple[type, ...] = (
    range, slice, complex, fractions.Fraction, decimal.Decimal, pathlib.PurePath, datetime.date, datetime.time,
    datetime.timedelta, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo,
    types.UnionType, types.GenericAlias, numpy.dtype, numpy.generic, typing.TypeVar,
)  # fmt: skip
_DESCRIPTORS: tuple[type, ...] = (
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
# Of these, and of objects and containers, it matters which of several equal ones stands at a place.
_OF_PLACES: tuple[type, ...] = (
    types.FunctionType, functools.partial, functools._lru_cache_wrapper, nn.Module, Tensor, numpy.ndarray,
    list, dict, set,
)  # fmt: skip
_DEEPEST = 20
# Of containers and objects no more are watched, see ``contents``.
_MOST = 50_000


class Untold(ValueError):
    """What cannot be told in words that mean the same in every process; the message says what, in one line."""


def evidence_of(
    model: nn.Module,
    reads: Collection[Read],
    slots: Collection[tuple[str, str]],
    looks: bool = False,
    codes: Codes | None = None,
) -> str:
    """A digest of all that traces of ``model``, and of modules within it, depend on beside their arguments. That the
    model is converted makes no difference.

    Args:
        reads: what these traces have read.
        slots: path and name of each tensor that their programs read anew in every call.
        looks: whether the code looks at elements of tensors, so that those of attributes matter.
        codes: takes up the code behind the model, for those who watch it from now on.

    Raises:
        Untold: there is something that cannot be told.
    """
    state = ModelState(model, reads, slots, looks=looks, codes=codes)
    entries = [
        *zip(state.code.names, state.code.watch.entries),
        *zip(state.attribute_reasons, state.attributes.entries),
    ]
    compared = [*state.code.compared, *state.compared]
    found = [(name, (key, value)) for name, (_, key, value) in entries if not _follows(name, key)]
    found += [
        (name, (value, str(fingerprints([value])) if isinstance(value, Tensor) else k)) for name, value, k in compared
    ]
    placed = list(_placed(found))
    teller = _Teller(_places(model, placed))
    lines = [*_process(), *_structure(model, teller)]
    # Those that are plain attributes are in no store of their module. Slots from an unknown hand may be nowhere.
    held = {path: vars(module) for path, module in model.named_modules(remove_duplicate=False)}
    lines += [f"{path}.{name}: {teller.told(held[path][name])}" for path, name in slots if name in held.get(path, ())]
    lines += [f"{name} is {value!r}" for name, value in sorted(state.code.switches.items())]
    lines += [f"{place or name} | {teller.told(value, placed=bool(place))}" for name, place, value in placed]
    lines += [f"attributes: {names}" for _, names in state.namespaces]
    if len(lines) > _MOST:
        raise Untold("it depends on so much that not all of it is watched")
    for package in {str(name).partition(".")[0] for name in teller.modules}:
        lines.append(f"{package} {getattr(sys.modules.get(package), '__version__', '')}")
    return hashlib.sha256("\n".join(sorted(lines)).encode(errors="surrogatepass")).hexdigest()


def _follows(name: str, key: Any) -> bool:
    """Whether what stands in an entry follows from other entries."""
    if isinstance(key, str) and key.startswith(_OF_DYNAMO):
        return True
    # A library's answer follows from its code.
    return key == () and name.startswith("the answer of ") and not is_of_project(_module_in(name))


def _placed(found: list[tuple[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Each value with its name and its place, which is the name with a number: several holders may go by one name, such
    as the lists in a list, and may not change places. Libraries fill dicts in an order that differs from process to
    process: what they have in their globals has no place."""
    counts = Counter[str]()
    for name, value in found:
        counts[name] += 1
        yield name, "" if _is_of_library(name) else f"{name} {counts[name]}", value


def _places(model: nn.Module, placed: list[tuple[str, str, Any]]) -> dict[int, str]:
    """Of each module, tensor, function, object and container the first of its places, in the order of their names: by
    it is told which of several equal ones stands at the others."""
    own: dict[int, str] = {}
    for path, module in model.named_modules():
        own[id(module)] = f"the module {path}"
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                own.setdefault(id(tensor), f"{path}.{name}")
    found: dict[int, str] = {}
    for _, place, value in placed:
        for index, each in enumerate(_of_places(value) if place else ()):
            found[id(each)] = min(f"{place}.{index}", found.get(id(each), f"{place}.{index}"))
    return found | own


def _of_places(value: Any, depth: int = 0) -> Iterator[Any]:
    """``value`` and what tuples, methods and partial functions in it are made of, as far as they are one of those that
    may change places."""
    inner: tuple[Any, ...] = ()
    if isinstance(value, tuple):
        inner = tuple(value)
    elif isinstance(value, (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)):
        inner = (getattr(value, "__func__", None), value.__self__)
    elif isinstance(value, functools.partial):
        inner = (value.func, *value.args, *value.keywords.values())
    if isinstance(value, _OF_PLACES) or is_plain_object(value) or slotted(value):
        yield value
    if depth < _DEEPEST:
        for each in inner:
            yield from _of_places(each, depth + 1)


def _is_of_library(name: str) -> bool:
    """Whether it is the name of what a module of Python's, or of an installed library, has in its globals."""
    path = name.partition(".")[0]
    if path not in sys.modules or is_of_project(path) or "<locals>" in name:
        return False
    while path in sys.modules:  # a function or class of the user's own may have the name of a module, too
        rest = name[len(path) + 1 :].partition(".")[0]
        if rest in vars(sys.modules[path]) and f"{path}.{rest}" not in sys.modules:
            return True
        path = f"{path}.{rest}"
    return False


def _process() -> Iterator[str]:
    """The versions of what is not looked into, and what of the state of a process a trace sees."""
    if global_hook() is not None or onlooker() is not None:
        raise Untold(str(global_hook() or onlooker()))
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise Untold("autocast is on")
    yield f"kfconvert {__version__}, torch {torch.__version__}, numpy {numpy.__version__}"
    yield f"{platform.python_implementation()} {platform.python_version()}"
    yield f"{torch.get_default_dtype()} {default_device()} {torch.are_deterministic_algorithms_enabled()}"


def _structure(model: nn.Module, teller: _Teller) -> Iterator[str]:
    """The modules and tensors of ``model``, each with the first of its places, which tells which of them are one."""
    for path, module in model.named_modules(remove_duplicate=False):
        guarded = guarded_forward(module)
        own_forward = vars(module).get("forward") if guarded is None else guarded.own_forward
        if own_forward is not None or has_hooks(module):
            raise Untold(f"{path or 'the model'} has a forward or hooks of its own")
        if not vars(module).keys().isdisjoint((*module._parameters, *module._buffers, *module._modules)):
            raise Untold(f"{path or 'the model'} has attributes in the place of parameters, buffers or submodules")
        yield f"{path} is {teller.told(type(module))}, {module.training}, {teller.place(module)}"
        for kind, store in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in store.items():
                yield f"{path}: {kind} {key} is {teller.told(tensor, placed=True)}"


class _Teller:
    """Tells values. It keeps what it has told, as most is told many times. What is told as ``placed`` has its place
    among ``places``, by the ids of objects."""

    def __init__(self, places: dict[int, str]) -> None:
        self._told: dict[tuple[int, bool], tuple[Any, str]] = {}
        self._places = places
        self.modules: set[str] = set()  # the names of Python modules that have functions and classes among it

    def told(self, value: Any, depth: int = 0, placed: bool = False) -> str:
        known = self._told.get((id(value), placed))
        if known is None:
            told = self._tell(value, depth, placed)
            if placed and id(value) in self._places:
                told = f"{told} as {self.place(value)}"
            known = self._told[id(value), placed] = value, told
        return known[1]

    def place(self, value: Any) -> str:
        """The first place of ``value``, which has one."""
        return self._places[id(value)]

    def _tell(self, value: Any, depth: int, placed: bool) -> str:
        kind = type(value)
        if depth > _DEEPEST:
            raise Untold("it depends on values that are nested too deeply")
        if value is None or kind in (bool, int, str, bytes, float):
            return repr(value)
        if isinstance(value, Mark):
            return value.name
        if isinstance(value, enum.Enum):
            return f"{class_name(kind)}.{value.name} {self.told(value._value_, depth + 1, placed)}"
        for plain in (int, float, str, bytes):
            if isinstance(value, plain):  # of a class that is derived from it
                return f"{self.told(kind)} {plain.__repr__(value)}"
        if isinstance(value, (tuple, frozenset)):
            items = [self.told(each, depth + 1, placed) for each in value]
            return f"{class_name(kind)}{sorted(items) if isinstance(value, frozenset) else items}"
        if isinstance(value, Tensor):
            strides = value.stride() if value.layout is torch.strided else value.layout
            return f"{class_name(kind)} {value.dtype} {value.device} {value.shape} {strides}"
        # What these hold has entries of its own; of some dicts that is what was read of them, whatever else they hold.
        if isinstance(value, (list, dict, set)) and not is_config_dict(value):
            return f"{class_name(kind)} of {len(value)}"
        if isinstance(value, type):
            self.modules.add(value.__module__)
            return f"class {[class_name(base) for base in value.__mro__]} {_members_of(value)} {_annotations_of(value)}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        told = self._tell_code(value, depth, placed)
        return self._tell_object(value) if told is None else told

    def _tell_code(self, value: Any, depth: int, placed: bool) -> str | None:
        """Functions, what they are made of, and what is made of them."""
        inner: tuple[Any, ...]
        if isinstance(value, types.CodeType):
            numbers = value.co_flags, value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount
            names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
            jumps = getattr(value, "co_exceptiontable", b"")
            inner = value.co_consts
            return f"code {value.co_name} {value.co_code!r} {numbers} {names} {jumps!r} {self.told(inner, depth + 1)}"
        if isinstance(value, types.FunctionType):
            self.modules.add(value.__module__)
            code, annotations = self.told(value.__code__, depth + 1), _annotations_of(value)
            return f"function {class_name(value)} {code} {annotations}"  # type: ignore[arg-type]
        if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            owner = self._places.get(id(value.__self__), "") if placed else ""
            return f"{value.__module__}.{value.__qualname__} of a {class_name(type(value.__self__))} {owner}"
        if isinstance(value, types.MethodType):
            owner = self._places.get(id(value.__self__), "") if placed else ""
            inner = value.__func__, type(value.__self__), owner
        elif isinstance(value, property):
            inner = value.fget, value.fset
        elif isinstance(value, (staticmethod, classmethod, functools._lru_cache_wrapper)):
            inner = (value.__wrapped__,)
        elif isinstance(value, functools.cached_property):
            inner = (value.func,)
        elif isinstance(value, functools.partial):
            inner = value.func, value.args, tuple(sorted(value.keywords.items()))
        else:
            return None
        return f"{class_name(type(value))} of {self.told(inner, depth + 1, placed)}"

    def _tell_object(self, value: Any) -> str:
        kind = type(value)
        if isinstance(value, _DESCRIPTORS):
            descriptor: Any = value
            return f"{descriptor.__name__} of {class_name(descriptor.__objclass__)}"
        if isinstance(value, _BY_TEXT):
            return f"{class_name(kind)} {value!r}"
        if isinstance(value, re.Pattern):
            return f"{value.pattern!r} {value.flags}"
        if isinstance(value, numpy.ndarray):
            return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        # What objects of an author's hold has entries of its own.
        known = isinstance(value, (nn.Module, *_STATELESS)) or kind is object or class_name(kind) in _STATELESS_BY_NAME
        if known or is_plain_object(value) or is_config_dict(value) or slotted(value):
            return f"a {self.told(kind)}"
        raise Untold(f"it depends on a {kind.__module__}.{kind.__qualname__}")


def _members_of(kind: type) -> list[str]:
    """The names of what a class of the user's own has, in their order, in which the members of an enumeration come, and
    its text."""
    if not is_of_project(kind.__module__):
        return []
    return [*(name for name in vars(kind) if not name.startswith("_")), str(vars(kind).get("__doc__"))]


def _annotations_of(value: Any) -> list[str]:
    """Those of a function or class of the user's own."""
    found = vars(value).get("__annotations__", {}) if isinstance(value, type) else value.__annotations__
    if not is_of_project(value.__module__) or not isinstance(found, dict):
        return []
    texts = (k if isinstance(k, str) else getattr(k, "__qualname__", type(k).__qualname__) for k in found.values())
    return [f"{name}: {text}" for name, text in zip(found, texts)]


def _module_in(name: str) -> str:
    """The Python module in the name of the answer of a function."""
    return name.removeprefix("the answer of ").rpartition(".")[0]
