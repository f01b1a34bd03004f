"""Records the plain attributes and objects, such as configurations, that the forward of a model reads. Changes of all
others are irrelevant."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import _AttrProxy
from torch.nn.modules.dropout import _DropoutNd

from ...process import ThisThread, method_over
from ...region import Read
from .references import Holdings, configurations

_OF_EVERY_MODULE = frozenset(dir(nn.Module())) - {"training"}
# Names that return all parameters or buffers, including later additions.
WHOLE = frozenset(
    ("parameters", "named_parameters", "buffers", "named_buffers", "_parameters", "_buffers", "state_dict")
)


def names_by_class(reads: Collection[Read]) -> dict[type, set[str]]:
    """The names of attributes that were read from modules, by the class of the module."""
    found: dict[type, set[str]] = {}
    for read in reads:
        if isinstance(read, tuple):
            found.setdefault(read[0], set()).add(read[1])
    return found


@contextmanager
def recorded_reads(model: nn.Module) -> Iterator[set[Read]]:
    """Context manager that collects reads from the modules of ``model`` and from the objects that they hold."""
    reads: set[Read] = set()
    held = Holdings(model)
    by_class: dict[type, list[Any]] = {}
    for each in (*dict.fromkeys(model.modules()), *held.configurations):
        by_class.setdefault(type(each), []).append(each)
    with ExitStack() as stack:
        for own, holders in by_class.items():
            try:
                stack.enter_context(_recorded(own, reads))
            except Exception:  # the class accepts no method: assume that everything is read
                reads.add((own, "__dict__"))
                reads.update(() if issubclass(own, nn.Module) else [name for each in holders for name in vars(each)])
        yield reads
    reads |= implied(reads, model)


def implied(reads: Collection[Read], model: nn.Module) -> set[Read]:
    """The settings of ``model`` that ``reads`` implies: all settings where ``__dict__`` was read, and settings that
    were read by another of their names."""
    found: set[Read] = set()
    for config in configurations(model):
        if "__dict__" in reads:
            # The path that transformers has loaded it from differs for each artifact, and counts only where it is read.
            found |= vars(config).keys() - {"_name_or_path"}
        # transformers has aliases for some settings.
        aliases = getattr(config, "attribute_map", None)
        if isinstance(aliases, dict):
            found.update([aliases[name] for name in reads if name in aliases])
    return found


@contextmanager
def _recorded(own: type, reads: set[Read]) -> Iterator[None]:
    """Context manager that adds this thread's reads of objects of the exact class ``own`` to ``reads``, including
    copies that the forward makes."""
    of_module, here = issubclass(own, nn.Module), ThisThread()
    # In eval mode, torch's own dropouts ignore the attributes that they read.
    idle = _DropoutNd.__module__ if issubclass(own, _DropoutNd) else None
    if issubclass(own, torch.jit.ScriptModule):
        raise TypeError("its attributes are read by compiled code")

    def reading(before: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def read(self: Any, name: str) -> Any:
            # A derived class has a different function in its place.
            if _is_of(type(self), own) and here and (not of_module or _is_read_of_module(name, idle)):
                reads.add((own, name) if of_module else name)
            return before(self, name)

        return read

    with method_over(own, "__getattribute__", reading):
        try:
            yield
        finally:
            here.over = True


def _is_of(kind: type, own: type) -> bool:
    """Whether ``kind`` is ``own`` or the exporter's replacement for it. For modules that are registered at several
    places, the exporter creates objects with the same attributes, of a derived class for each place."""
    return kind is own or (own in kind.__bases__ and issubclass(kind, _AttrProxy))


def _is_read_of_module(name: str, idle: str | None) -> bool:
    """Whether reading the attribute ``name`` of a module, two frames up, makes its forward depend on it. Names that
    return all attributes, parameters or buffers do not count where torch or this package reads them."""
    if name == "__dict__" or name in WHOLE:
        return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] not in ("torch", "kfconvert")
    if idle is not None and sys._getframe(2).f_globals.get("__name__") == idle:
        return False
    return name not in _OF_EVERY_MODULE
