"""Records the plain attributes and objects, such as configurations, that the forward of a model reads. Changes of all
others are irrelevant."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import _AttrProxy
from torch.nn.modules.dropout import _DropoutNd

from ...inputs import is_equal
from ...process import ThisThread, method_over
from ...region import Read
from .authors import is_of_author
from .config_dicts import recorded_entries
from .fingerprint import may_fetch
from .references import (
    OF_CONVERSION,
    OF_EVERY_MODULE,
    Holdings,
    configurations,
    is_config_dict,
    is_plain_object,
    slotted,
)
from .watch import MISSING

# The maximum depth at which nested configurations are compared.
_DEPTH = 20

_OF_EVERY_MODULE = frozenset(dir(nn.Module())) - {"training"}
# A module's attribute with one of these names takes precedence.
_METHODS = frozenset(name for name in _OF_EVERY_MODULE - OF_EVERY_MODULE - OF_CONVERSION if not name.startswith("__"))
# The attributes of every module besides its mode and the module tree, such as its hooks.
HELD_BY_ALL = OF_EVERY_MODULE - {"training", "_parameters", "_buffers", "_modules"}

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
    kinds = set(map(type, held.config_dicts))
    by_class = grouped_by_class([*dict.fromkeys(model.modules()), *held.configurations])
    with ExitStack() as stack:
        for own, holders in by_class.items():
            try:
                stack.enter_context(_recorded(own, reads))
            except Exception:  # the class accepts no method: assume that everything is read
                reads.add((own, "__dict__"))
                reads.update(() if issubclass(own, nn.Module) else [name for each in holders for name in vars(each)])
        for own in kinds:
            stack.enter_context(recorded_entries(own, reads))
        yield reads
    reads |= implied(reads, model)


def grouped_by_class(holders: Iterable[Any]) -> dict[type, list[Any]]:
    found: dict[type, list[Any]] = {}
    for holder in holders:
        found.setdefault(type(holder), []).append(holder)
    return found


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


def is_alike(value: Any, other: Any, reads: Collection[Read], depth: int = 0) -> bool:
    """Whether a forward with ``reads`` finds equal values in both: the values are equal, or both are configurations of
    one class with equal settings among ``reads``."""
    if is_equal(value, other):
        return True
    kind = type(value)
    if kind is not type(other) or depth > _DEPTH:
        return False
    if kind is Tensor:
        kinds = [(each.shape, each.stride(), each.dtype, each.device, each.requires_grad) for each in (value, other)]
        return kinds[0] == kinds[1] and may_fetch() and torch.equal(value, other)
    if kind is dict:  # a table that ``eval()`` cleared and a call refilled
        return list(value) == list(other) and all(is_alike(value[key], other[key], reads, depth + 1) for key in value)
    if not is_of_author(kind.__module__) or slotted(value):
        return False
    if not (is_plain_object(value) or is_config_dict(value)) or {"__dict__", (kind, "__dict__")} & set(reads):
        return False
    held = [(vars(value), vars(other)), *([(value, other)] if isinstance(value, dict) else [])]
    names = [read for read in reads if isinstance(read, str)]
    return all(
        is_alike(dict.get(ours, name, MISSING), dict.get(theirs, name, MISSING), reads, depth + 1)
        for ours, theirs in held
        for name in names
    )


@contextmanager
def without_cache(model: nn.Module) -> Iterator[bool]:
    """Context manager under which the setting ``use_cache`` of ``model`` is off; False if it was off already."""
    found = [vars(config) for config in configurations(model) if "use_cache" in vars(config)]
    if not found or any(settings["use_cache"] is not True for settings in found):
        yield False
        return
    try:
        for settings in found:
            settings["use_cache"] = False
        yield True
    finally:
        for settings in found:
            settings["use_cache"] = True


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
    """Whether reading the attribute ``name`` of a module, two frames up, makes its forward depend on it. Attributes of
    every module, and names that return all attributes, parameters or buffers, do not count where torch or this package
    reads them."""
    if name == "__dict__" or name in WHOLE or name in _METHODS or name in HELD_BY_ALL:
        return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] not in ("torch", "kfconvert")
    if idle is not None and sys._getframe(2).f_globals.get("__name__") == idle:
        return False
    return name not in _OF_EVERY_MODULE
