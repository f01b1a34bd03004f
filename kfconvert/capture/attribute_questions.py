"""Records attributes that a forward reads from tensors but a trace's stand-ins lack, such as a user-assigned scale of a
weight, and attributes that it sets on its arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor

from ..graph import place_now
from ..process import ThisThread
from ..region import CaptureError
from ..runtime import is_of_author
from .compiler_questions import OF_HELPERS


@contextmanager
def noted_attributes() -> Iterator[dict[str, str | None]]:
    """Context manager whose dict collects the attributes that a model's author reads from stand-ins in this thread and
    that these lack, each with its place in the code. Some names identify the tensor's library (``__array__``, or names
    of helpers); nobody assigns these."""
    here, names = ThisThread(), dict[str, str | None]()

    def missing(self: FakeTensor, name: str) -> Any:
        asking = sys._getframe(1).f_globals.get("__name__") or ""
        is_protocol = (name.startswith("__") and name.endswith("__")) or asking.startswith(OF_HELPERS)
        if here and not is_protocol and is_of_author(asking):
            names.setdefault(name, place_now())
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    FakeTensor.__getattr__ = missing  # type: ignore[attr-defined]  # called where normal lookup fails
    try:
        yield names
    finally:
        del FakeTensor.__getattr__  # type: ignore[attr-defined]
        here.over = True


def refuse_attributes(
    names: Iterable[str], tensors: Iterable[Tensor], places: Mapping[str, str | None] = MappingProxyType({})
) -> None:
    """Raises CaptureError where a tensor has one of the attributes ``names``, which the code reads at these places."""
    tensors = list(tensors)
    for name in sorted(names):
        if any(name in vars(tensor) for tensor in tensors):
            reason = f"its forward reads the attribute {name} of a tensor, which a graph does not record"
            raise CaptureError(reason, places.get(name))


@contextmanager
def set_attributes(tensors: Sequence[Tensor]) -> Iterator[set[str]]:
    """Context manager that removes the attributes of ``tensors``. At the end, the set has the names of attributes
    assigned within it, which are removed again."""
    names, before = set[str](), [dict(vars(tensor)) for tensor in tensors]
    for tensor in tensors:
        vars(tensor).clear()
    try:
        yield names
    finally:
        for tensor, own in zip(tensors, before):
            names.update(vars(tensor))
            vars(tensor).clear()
            vars(tensor).update(own)
