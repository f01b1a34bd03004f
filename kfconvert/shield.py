"""Keeps from other threads what ``torch.export`` replaces in the whole process while one thread traces."""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .turns import ThisThread

# (holder, name) of the functions that the exporter replaces.
_REPLACED = (
    (nn.Module, "__call__"), (nn.Module, "__getattr__"),
    (builtins, "max"), (builtins, "min"), (math, "pow"),
)  # fmt: skip


class Shield:
    """Made before a trace begins, it knows what other threads are to find during it."""

    def __init__(self):
        self._originals = [(holder, name, getattr(holder, name)) for holder, name in _REPLACED]

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Within the block, which lies in what is traced, other threads find the functions of before the trace.

        Else the modules that they call would be looked up, and entered, in the tracer. At its end the exporter finds
        what it has put there, and takes it away.
        """
        here, changed = ThisThread(), []
        for holder, name, original in self._originals:
            replaced = getattr(holder, name)
            if replaced is not original:
                changed.append((holder, name, replaced, _chosen(here, replaced, original)))
        for holder, name, _, ours in changed:
            setattr(holder, name, ours)
        try:
            yield
        finally:
            for holder, name, replaced, ours in changed:
                if getattr(holder, name) is ours:
                    setattr(holder, name, replaced)
            here.over = True  # should somebody have kept ours, to put it back later


def _chosen(here: ThisThread, own: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(other)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (own if here else other)(*args, **kwargs)

    return choose
