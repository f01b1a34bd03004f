"""The functions behind the forwards of a model: methods of its classes, and functions that these name.

Libraries patch both in a process with a converted model: the ``forward`` of a class, or a function such as
``apply_rotary_pos_emb`` in the globals of a model's file. Functions that code finds in other ways, such as in lists and
dicts, are fixed at conversion, see ``docs/guide/limits.md``.
"""

from __future__ import annotations

import collections
import dis
import functools
import gc
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn

from ...region import Read
from .authors import is_of_author
from .configuration import names_by_class
from .contents import Found
from .random_generators import GENERATORS
from .references import Holdings
from .watch import CODE, MISSING

# torch looks up these names in the class of every module.
_ALWAYS = frozenset(("forward", "__call__", "_call_impl", "_wrapped_call_impl"))
_CONTAINERS = (list, dict, set, collections.deque, *GENERATORS)
# The attributes by which methods, properties, and partial and decorated functions refer to functions.
_INNER = ("__func__", "fget", "func", "__wrapped__")
_AROUND_FUNCTIONS = (
    types.FunctionType, types.MethodType, staticmethod, classmethod, property, functools.cached_property,
    functools.partial, functools.partialmethod, functools._lru_cache_wrapper,
)  # fmt: skip


def whole_walk(model: nn.Module) -> CodeWalk:
    """All code that modules and configurations of ``model`` can run, even if a trace did not read it."""
    held = Holdings(model)
    return CodeWalk([type(each) for each in (*model.modules(), *held.configurations)], held.functions, None)


def class_dict(owner: type) -> dict[str, Any]:
    """The dict behind the read-only ``owner.__dict__``, which hides the dict's version."""
    return gc.get_referents(owner.__dict__)[0]


class CodeWalk:
    """The functions that instances of ``classes`` run, from their forwards on, and that ``functions`` call.

    ``asked_for`` has the names of attributes and globals in the code of model authors. ``containers`` has lists, dicts
    and sets by the names of their globals, ``cached`` the functions with a cache.

    Args:
        reads: the reads of a trace; the walk follows only these methods and properties of classes. None follows all
            methods that any of the code names.
    """

    def __init__(self, classes: Iterable[type], functions: Iterable[Any], reads: Collection[Read] | None):
        self.asked_for = set[str]()
        self.containers: dict[str, Any] = {}
        self.cached: dict[int, functools._lru_cache_wrapper[Any]] = {}
        self._names = set[str](_ALWAYS)
        self._inherited = set[str](_ALWAYS)  # names that code reads from ``super()``
        self._functions: dict[int, types.FunctionType] = {}
        self._pending: list[types.FunctionType] = []
        self._found: dict[tuple[int, Any], Found] = {}
        of_class, of_objects = names_by_class(reads or ()), {read for read in reads or () if isinstance(read, str)}
        owners = list(dict.fromkeys(classes))
        # Libraries replace this function with their kernels; transformers calls it from a function in a registry.
        self._note(vars(nn.functional), "scaled_dot_product_attention", "torch.nn.functional")
        for function in functions:
            self._follow(function, getattr(function, "__qualname__", "a function"))
        known = -1
        while known != len(self._functions):
            known = len(self._functions)
            while self._pending:
                self._function(self._pending.pop())
            for owner in owners:
                read = of_class.get(owner, set()) if issubclass(owner, nn.Module) else of_objects
                self._methods(owner, self._inherited | (self._names if reads is None else read))

    def entries(self) -> Iterator[Found]:
        """The places that hold these functions, with their current values."""
        yield from self._found.values()

    def functions(self) -> list[types.FunctionType]:
        return list(self._functions.values())

    def _methods(self, owner: type, names: set[str]) -> None:
        """Methods called ``names`` of a class and of its bases. A method that is assigned to a class later takes
        precedence over the methods of its bases."""
        classes = owner.__mro__[:-1]
        for name in sorted(names):
            if any(name in vars(base) for base in classes):
                for base in classes:
                    self._note(class_dict(base), name, base.__qualname__)
                    self._follow(vars(base).get(name), f"{base.__qualname__}.{name}")

    def _follow(self, value: Any, name: str) -> None:
        """Follow the functions in ``value``: a function, method, property, or partial or decorated function."""
        if isinstance(value, types.FunctionType):
            if id(value) in self._functions or not _is_followed(value.__module__):
                return
            self._functions[id(value)] = value
            self._pending.append(value)
        if isinstance(value, functools._lru_cache_wrapper):
            self.cached[id(value)] = value
        if isinstance(value, _AROUND_FUNCTIONS):
            for inner in (getattr(value, each, None) for each in _INNER):
                self._follow(inner, name)
        elif isinstance(value, _CONTAINERS):
            self.containers.setdefault(name, value)

    def _function(self, function: types.FunctionType) -> None:
        self._found[id(function), CODE] = ((function, CODE, function.__code__), _reason(function.__qualname__))
        looked_up, names = _names_in(function.__code__)
        self._names |= names
        if "__class__" in function.__code__.co_freevars:
            self._inherited |= names
        if is_of_author(function.__module__):
            self.asked_for |= names
        for cell in function.__closure__ or ():
            if cell != types.CellType():  # it has a value
                self._follow(cell.cell_contents, function.__qualname__)
        self._globals(function.__globals__, function.__module__, looked_up, names, set())

    def _globals(
        self, held: dict[str, Any], module: str, looked_up: frozenset[str], names: frozenset[str], seen: set[int]
    ) -> None:
        """Follow the globals called ``looked_up`` of a Python module, and those called ``names`` of the modules among
        them."""
        seen.add(id(held))
        for name in sorted(looked_up & held.keys()):
            value = held[name]
            if not isinstance(value, types.ModuleType):
                self._note(held, name, module)
                self._follow(value, f"{module}.{name}")
            elif id(vars(value)) not in seen and (is_of_author(value.__name__) or value.__name__.startswith("torch")):
                self._globals(vars(value), value.__name__, names, names, seen)

    def _note(self, store: dict[str, Any], key: str, name: str) -> None:
        self._found.setdefault((id(store), key), ((store, key, store.get(key, MISSING)), _reason(f"{name}.{key}")))


@functools.lru_cache(4096)
def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the globals that ``code`` and its nested functions look up, and these with the names of
    attributes."""
    nested = [_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    instructions = dis.get_instructions(code)
    looked_up = frozenset(each.argval for each in instructions if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return (
        looked_up.union(*(names for names, _ in nested)),
        frozenset(code.co_names).union(*(names for _, names in nested)),
    )


def _reason(name: str) -> str:
    return f"{name} was replaced after the conversion; convert it again"


def _is_followed(module: str | None) -> bool:
    """Whether functions of the Python module of this name are followed: functions of a model's author, and the forwards
    of torch's modules, which look up their functions by name."""
    return is_of_author(module) or (
        (module or "").startswith(("torch.nn.modules.", "torch.nn.functional")) and module != nn.Module.__module__
    )
