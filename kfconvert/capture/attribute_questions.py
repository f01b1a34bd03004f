"""Which attributes a forward asks tensors for that they do not have by themselves, such as a scale that somebody has
given to a weight: a trace asks its stand-ins for them, and these have none. And which it sets on those it is given."""

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
    """Within the block, the dict collects the names of the attributes that a model's author asks stand-ins for in this
    thread, and that they do not have, each with where it was asked. By some it is asked what library a tensor is of
    (``__array__``, or those of helpers); nobody sets these."""
    here, names = ThisThread(), dict[str, str | None]()

    def missing(self: FakeTensor, name: str) -> Any:
        asking = sys._getframe(1).f_globals.get("__name__") or ""
        is_protocol = (name.startswith("__") and name.endswith("__")) or asking.startswith(OF_HELPERS)
        if here and not is_protocol and is_of_author(asking):
            names.setdefault(name, place_now())
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    FakeTensor.__getattr__ = missing  # type: ignore[attr-defined]  # called for what is not found otherwise
    try:
        yield names
    finally:
        del FakeTensor.__getattr__  # type: ignore[attr-defined]
        here.over = True


def refuse_attributes(
    names: Iterable[str], tensors: Iterable[Tensor], places: Mapping[str, str | None] = MappingProxyType({})
) -> None:
    """Raises CaptureError where one of ``tensors`` has one of the attributes ``names``, which were read at these places
    in the code."""
    tensors = list(tensors)
    for name in sorted(names):
        if any(name in vars(tensor) for tensor in tensors):
            reason = f"its forward reads the attribute {name} of a tensor, which a graph does not record"
            raise CaptureError(reason, places.get(name))


@contextmanager
def set_attributes(tensors: Sequence[Tensor]) -> Iterator[set[str]]:
    """Within the block, ``tensors`` have no attributes of their own; after it, the set has the names of those that they
    were given, which are gone again."""
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
