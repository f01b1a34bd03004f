"""What the forward of a model reads of its modules' plain attributes and of the objects that they hold, such as
configurations; later changes of all else do not matter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..process import ThisThread
from ..region import Read
from .contents import (
    OF_CONVERSION,
    OF_EVERY_MODULE,
    attributes_of,
    modules_around,
    outside_modules,
    plain_objects,
)

_OF_EVERY_MODULE = frozenset(dir(nn.Module())) - {"training"}
# An attribute that a module has by the name of one of these comes before it.
_METHODS = frozenset(name for name in _OF_EVERY_MODULE - OF_EVERY_MODULE - OF_CONVERSION if not name.startswith("__"))

# Names that give all parameters or buffers, including those that are added later.
WHOLE = frozenset(
    ("parameters", "named_parameters", "buffers", "named_buffers", "_parameters", "_buffers", "state_dict")
)


def configurations(model: nn.Module) -> list[Any]:
    """The distinct plain objects that ``model`` and its submodules hold, such as a ``config``, in containers too; and
    those that a larger model holds where ``model`` knows in which one it lies."""
    modules = [*model.modules(), *outside_modules(model), *modules_around(model)]
    found = [value for module in modules for name, value in attributes_of(module).items() if _is_read(name)]
    return plain_objects(found)


def _is_read(name: str) -> bool:
    # Only generate() reads the generation_config, and no forward does.
    return name != "generation_config" and name not in OF_CONVERSION


def names_by_class(reads: Collection[Read]) -> dict[type, set[str]]:
    """The names of attributes that were read of modules, by the class of the module."""
    found: dict[type, set[str]] = {}
    for read in reads:
        if isinstance(read, tuple):
            found.setdefault(read[0], set()).add(read[1])
    return found


@contextmanager
def recorded_reads(model: nn.Module) -> Iterator[set[Read]]:
    """Within the block, what is read of the modules of ``model`` and of the objects that they hold is collected."""
    reads: set[Read] = set()
    with ExitStack() as stack:
        recorders: dict[type, type] = {}
        for module in dict.fromkeys(model.modules()):
            stack.enter_context(_recorded(module, reads, recorders))
        for config in configurations(model):
            stack.enter_context(_recorded(config, reads, recorders))
        yield reads
    reads |= implied(reads, model)


def implied(reads: Collection[Read], model: nn.Module) -> set[Read]:
    """The settings of ``model`` that ``reads`` implies: all where ``__dict__`` was read, and those that were read by
    another of their names."""
    found: set[Read] = set()
    for config in configurations(model):
        if "__dict__" in reads:
            found.update(vars(config))
        # transformers lets some settings go by several names.
        aliases = getattr(config, "attribute_map", None)
        if isinstance(aliases, dict):
            found.update([aliases[name] for name in reads if name in aliases])
    return found


@contextmanager
def without_cache(model: nn.Module) -> Iterator[bool]:
    """Within the block, the setting ``use_cache`` of ``model``, which was on, reads as off in this thread; False if it
    was not. Other models, in other threads, may have the same configuration."""
    found = [config for config in configurations(model) if "use_cache" in vars(config)]
    with ExitStack() as stack:
        yield bool(found) and all(
            vars(config)["use_cache"] is True and stack.enter_context(_without_cache(config)) for config in found
        )


@contextmanager
def _without_cache(config: Any) -> Iterator[bool]:
    own: Any = type(config)
    here = ThisThread()

    def read(self: Any, name: str) -> Any:
        return False if name == "use_cache" and here else own.__getattribute__(self, name)

    try:
        set_class(config, derived_class(own, {"__getattribute__": read}))
    except Exception:  # a class that cannot be derived from or swapped
        yield False
        return
    try:
        yield True
    finally:
        set_class(config, own)


def set_class(holder: Any, kind: type) -> None:
    """``holder.__class__ = kind``, whatever its own ``__setattr__`` would do. Raises TypeError for some classes."""
    object.__setattr__(holder, "__class__", kind)


class _Blank:
    """The base that a derived class is made with, before it is given its real one: a class is told when a subclass of
    it is made, and some keep a list of these, but not when it becomes the base of a class that exists."""


@contextmanager
def _recorded(holder: Any, reads: set[Read], recorders: dict[type, type]) -> Iterator[None]:
    own = type(holder)
    try:
        if own not in recorders:
            recorders[own] = _recorder(own, reads)
        set_class(holder, recorders[own])
    except Exception:  # a class that cannot be derived from or swapped: everything in it may have been read
        reads.update(() if isinstance(holder, nn.Module) else vars(holder), [(own, "__dict__")])
        yield
        return
    try:
        yield
    finally:
        set_class(holder, own)


def _recorder(own: type, reads: set[Read]) -> type:
    """A subclass of ``own`` that adds to ``reads`` what this thread reads of its instances."""
    of_module, here = issubclass(own, nn.Module), ThisThread()
    # In eval mode, torch's own dropouts do nothing with what they read of themselves.
    idle = _DropoutNd.__module__ if issubclass(own, _DropoutNd) else None
    if issubclass(own, torch.jit.ScriptModule):
        raise TypeError("its attributes are read by compiled code")

    def read(self: Any, name: str) -> Any:
        if here and (_is_read_of_module(name, idle) if of_module else True):
            reads.add((own, name) if of_module else name)
        return own.__getattribute__(self, name)

    return derived_class(own, {"__getattribute__": read})


def derived_class(own: type, methods: Mapping[str, Callable[..., Any]]) -> type:
    """A subclass of ``own`` that differs from it by ``methods`` only, and of which ``own`` is not told."""
    namespace = {**methods, "__module__": own.__module__, "__qualname__": own.__qualname__}
    derived = type(own)(own.__name__, (_Blank,), namespace)
    derived.__bases__ = (own,)
    return derived


def _is_read_of_module(name: str, idle: str | None) -> bool:
    """Whether reading the attribute ``name`` of a module, two frames up from here, makes its forward depend on it.
    Attributes that every module has do not count, as torch's own code reads them. Methods that every module has, and
    what gives all attributes, parameters or buffers, do, unless torch or this package reads them."""
    if name == "__dict__" or name in WHOLE or name in _METHODS:
        return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] not in ("torch", "kfconvert")
    if idle is not None and sys._getframe(2).f_globals.get("__name__") == idle:
        return False
    return name not in _OF_EVERY_MODULE
