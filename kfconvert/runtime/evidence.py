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

from ..region import Read, class_name
from ..version import __version__
from .code_state import Codes
from .contents import is_of_project, is_plain_object, slotted
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
    teller = _Teller()
    lines = [*_process(), *_structure(model, teller)]
    # Those that are plain attributes are in no store of their module. Slots from an unknown hand may be nowhere.
    held = {path: vars(module) for path, module in model.named_modules(remove_duplicate=False)}
    lines += [f"{path}.{name}: {teller.told(held[path][name])}" for path, name in slots if name in held.get(path, ())]
    state = ModelState(model, reads, slots, looks=looks, codes=codes)
    lines += [f"{name} is {value!r}" for name, value in sorted(state.code.switches.items())]
    named = [*zip(state.code.names, state.code.watch.entries), *zip(state.attribute_reasons, state.attributes.entries)]
    found = [(name, told) for name, entry in named for told in teller.entry(name, *entry)]
    for name, value, known in (*state.code.compared, *state.compared):
        content = fingerprints([value]) if isinstance(value, Tensor) else teller.told(known)
        found.append((name, f"{teller.told(value)} {content}"))
    lines += _numbered(found)
    lines += [f"attributes: {names}" for _, names in state.namespaces]
    if len(lines) > _MOST:
        raise Untold("it depends on so much that not all of it is watched")
    for package in {str(name).partition(".")[0] for name in teller.modules}:
        lines.append(f"{package} {getattr(sys.modules.get(package), '__version__', '')}")
    return hashlib.sha256("\n".join(sorted(lines)).encode(errors="surrogatepass")).hexdigest()


def _numbered(found: list[tuple[str, str]]) -> Iterator[str]:
    """What was told by each name, with its place among what has that name: several holders may go by one, such as the
    lists in a list, and may not change places. Libraries fill dicts in an order that differs from process to
    process."""
    counts = Counter[str]()
    for name, told in found:
        counts[name] += not _is_of_library(name)
        yield f"{name} {counts[name]} | {told}"


def _is_of_library(name: str) -> bool:
    """Whether it is the name of what a module of Python's, or of an installed library, has in its globals."""
    root, dot, _ = name.partition(".")
    return bool(dot) and root in sys.modules and not is_of_project(root)


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
    """The modules and tensors of ``model``, and which of them are one."""
    numbers: dict[int, int] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        guarded = guarded_forward(module)
        own_forward = vars(module).get("forward") if guarded is None else guarded.own_forward
        if own_forward is not None or has_hooks(module):
            raise Untold(f"{path or 'the model'} has a forward or hooks of its own")
        if not vars(module).keys().isdisjoint((*module._parameters, *module._buffers, *module._modules)):
            raise Untold(f"{path or 'the model'} has attributes in the place of parameters, buffers or submodules")
        number = numbers.setdefault(id(module), len(numbers))
        yield f"{path} is {number}, {teller.told(type(module))}, {module.training}"
        for kind, store in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in store.items():
                one = None if tensor is None else numbers.setdefault(id(tensor), len(numbers))
                yield f"{path}: {kind} {key} is {one}, {teller.told(tensor)}"


class _Teller:
    """Tells values and entries of a Watch. It keeps what it has told, as most is told many times."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[Any, str]] = {}
        self.modules: set[str] = set()  # the names of Python modules that have functions and classes among it

    def entry(self, name: str, holder: Any, key: Any, expected: Any) -> list[str]:
        if isinstance(key, str) and key.startswith(_OF_DYNAMO):
            return []
        if key == () and name.startswith("the answer of ") and not is_of_project(_module_in(name)):
            return []  # a library's answer follows from its code
        return [f"{self.told(key)} | {self.told(expected)}"]

    def told(self, value: Any, depth: int = 0) -> str:
        known = self._told.get(id(value))
        if known is None:
            known = self._told[id(value)] = value, self._tell(value, depth)
        return known[1]

    def _tell(self, value: Any, depth: int) -> str:
        kind = type(value)
        if depth > _DEEPEST:
            raise Untold("it depends on values that are nested too deeply")
        if value is None or kind in (bool, int, str, bytes, float):
            return repr(value)
        if isinstance(value, Mark):
            return value.name
        if isinstance(value, enum.Enum):
            return f"{class_name(kind)}.{value.name}"
        if isinstance(value, (tuple, frozenset)):
            items = [self.told(each, depth + 1) for each in value]
            return f"{class_name(kind)}{sorted(items) if isinstance(value, frozenset) else items}"
        if isinstance(value, Tensor):
            strides = value.stride() if value.layout is torch.strided else value.layout
            return f"{class_name(kind)} {value.dtype} {value.device} {value.shape} {strides}"
        if isinstance(value, (list, dict, set)):  # what these hold has entries of its own
            return f"{class_name(kind)} of {len(value)}"
        if isinstance(value, type):
            self.modules.add(value.__module__)
            return f"class {[class_name(base) for base in value.__mro__]} {_members_of(value)} {_annotations_of(value)}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        told = self._tell_code(value, depth)
        return self._tell_object(value) if told is None else told

    def _tell_code(self, value: Any, depth: int) -> str | None:
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
            return f"{value.__module__}.{value.__qualname__} of a {class_name(type(value.__self__))}"
        if isinstance(value, types.MethodType):
            inner = value.__func__, type(value.__self__)
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
        return f"{class_name(type(value))} of {self.told(inner, depth + 1)}"

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
        if known or is_plain_object(value) or slotted(value):
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
