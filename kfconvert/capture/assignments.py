"""Checks that a trace assigns only the module attributes that the example call assigns.

A call does not assign a cache that already fits its shape. A graph traced with another shape would compute the cache in
every call, and would not keep it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from torch import nn

from ..graph import place_now
from ..inputs import is_equal
from ..process import ThisThread, method_over
from ..runtime import MISSING, OF_EVERY_MODULE, grouped_by_class, is_of_author
from .own_writes import BY_SHAPE, Attribute, Change

_allowed: ContextVar[Collection[Attribute] | None] = ContextVar("allowed", default=None)


@contextmanager
def only_assigned(allowed: Collection[Attribute] | None) -> Iterator[None]:
    """Context manager under which traces may change only ``allowed`` attributes; any where that is None."""
    token = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(token)


@contextmanager
def assignments_checked(model: nn.Module) -> Iterator[None]:
    """Context manager for a trace of ``model``, which restores disallowed assignments at the end.

    Raises:
        CaptureError: the trace has changed the value of an attribute that is not allowed.
    """
    allowed = _allowed.get()
    if allowed is None:
        yield
        return
    # Keyed by the dict of the module: the exporter replaces some modules with objects that share the dict.
    modules = {id(vars(module)): module for module in model.modules()}
    before = {module: [dict(store) for store in _stores(module)] for module in modules.values()}
    # The original value, the last value, as the exporter restores some, and the place of that assignment.
    assigned: dict[Attribute, tuple[Any, Any, str | None]] = {}
    here = ThisThread()

    def writing(assign: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
        def write(self: Any, name: str, value: Any) -> None:
            module = modules.get(id(vars(self))) if here and name not in OF_EVERY_MODULE else None
            # The exporter assigns stand-ins of parameters.
            by_author = is_of_author(sys._getframe(1).f_globals.get("__name__"))
            if module is not None and by_author and (module, name) not in allowed:
                held, *_ = assigned.get((module, name)) or (_held(module, name),)
                assigned[module, name] = held, value, place_now()
            assign(self, name, value)

        return write

    changes = []
    paths = {module: path for path, module in model.named_modules()}
    try:
        with ExitStack() as stack:
            for own in grouped_by_class(modules.values()):
                with suppress(TypeError):  # the class accepts no method
                    stack.enter_context(method_over(own, "__setattr__", writing))
            try:
                yield
            finally:
                here.over = True
    finally:
        for (module, name), (held, value, place) in assigned.items():
            if not is_equal(held, value):
                changes.append(Change(f"{paths[module]}.{name}".lstrip("."), BY_SHAPE, place))
                _put_back(module, name, before[module])
    if changes:
        raise changes[0].error()


def _stores(module: nn.Module) -> list[dict[str, Any]]:
    return [vars(module), module._parameters, module._buffers]


def _held(module: nn.Module, name: str) -> Any:
    return next((store[name] for store in _stores(module) if name in store), MISSING)


def _put_back(module: nn.Module, name: str, before: list[dict[str, Any]]) -> None:
    for store, known in zip(_stores(module), before):
        if name in known:
            store[name] = known[name]
        else:
            store.pop(name, None)
