"""Records the items and attributes that code reads from configurations that are dicts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ...process import ThisThread, method_over
from ...region import Read

_OF_KEYS = ("__getitem__", "__contains__", "get")
_OF_ALL = ("__iter__", "__len__", "__eq__", "__ne__", "__reversed__", "__or__", "__ror__", "__repr__")
# Class attributes whose use reads no item.
_OF_NOTHING = frozenset((*_OF_KEYS, "__class__"))
_WHOLE = "__dict__"


@contextmanager
def recorded_entries(own: type, reads: set[Read]) -> Iterator[None]:
    """Context manager that adds this thread's reads of dicts of the exact class ``own`` to ``reads``;
    ``is_config_dict`` holds for ``own``."""
    here = ThisThread()

    def noted(self: Any, name: Any) -> None:
        if type(self) is own and here:
            reads.add(name if type(name) is str else _WHOLE)

    def of_key(before: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Any, key: Any, *default: Any) -> Any:
            noted(self, key)
            return before(self, key, *default)

        return read

    def of_all(before: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Any, *given: Any) -> Any:
            if _is_of_author():
                noted(self, _WHOLE)
            return before(self, *given)

        return read

    def of_name(before: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Any, name: str) -> Any:
            if not hasattr(own, name):
                noted(self, name)
            elif name not in _OF_NOTHING and _is_of_author():  # a method that may read anything
                noted(self, _WHOLE)
            return before(self, name)

        return read

    with ExitStack() as stack:
        for make, names in ((of_key, _OF_KEYS), (of_all, _OF_ALL), (of_name, ("__getattribute__",))):
            for name in names:
                stack.enter_context(method_over(own, name, make))
        try:
            yield
        finally:
            here.over = True


def _is_of_author() -> bool:
    """Whether the reading code, two frames up, belongs neither to torch nor to this package."""
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] not in ("torch", "kfconvert")
